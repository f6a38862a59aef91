"""What is allowed, probably not meant, and therefore said."""

import sys
from pathlib import Path

import pytest
import torch

from grpo_cli.recipe.addresses import TOKEN_VARIABLE
from grpo_cli.recipe.load import load_recipe
from grpo_cli.recipe.notices import missing_engine

pytestmark = pytest.mark.usefixtures("recipe_folder")


def notices(*overrides: str) -> tuple[str, ...]:
    return load_recipe(Path("good.yaml"), overrides).notices


def test_a_usual_recipe_has_none() -> None:
    assert notices() == ()


def test_bfloat16_weights_with_a_small_learning_rate_are_noticed() -> None:
    (notice,) = notices("model.dtype=bfloat16", "train.learning_rate=1e-6")
    assert notice == (
        "model.dtype: found bfloat16 with learning rate 1e-06; bfloat16 weights above about 0.00051 in size will not move, because a "
        "step of the optimizer is less than their rounding (use float32 with `train.bf16: true`)"
    )
    (notice,) = notices("model.dtype=auto", "train.learning_rate=9e-6")
    assert notice.startswith(
        "model.dtype: found auto with learning rate 9e-06; weights of a checkpoint in bfloat16 above"
    )


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.dtype=bfloat16", "train.learning_rate=1e-5"),
        ("model.dtype=float32", "train.learning_rate=1e-6", "train.bf16=true"),
        ("model.dtype=bfloat16", "train.learning_rate=0"),
        ("model.dtype=bfloat16", "train.learning_rate=1e-6", "distributed.strategy=deepspeed_zero3"),
    ],
)
def test_other_precisions_and_rates_are_not(overrides: tuple[str, ...]) -> None:
    assert notices(*overrides) == ()


def test_the_size_above_which_weights_stand_still_is_true_of_bfloat16() -> None:
    weights = torch.arange(1, 2**15, dtype=torch.int16).view(torch.bfloat16)
    weights = weights[(weights > 0) & (weights < 1)]
    rate = 1e-6
    moves = (weights - rate) != weights
    assert not moves[weights > 512 * rate].any()
    assert moves[weights < 256 * rate].all()


def test_evaluation_on_the_rows_of_training_is_noticed() -> None:
    same = ("eval.dataset.name=prompts.jsonl",)
    (notice,) = notices(*same)
    assert notice == (
        "eval.dataset: found prompts.jsonl (train), which is trained on as well, so that evaluation cannot tell learning from "
        "memorising (use another split or file)"
    )
    assert notices(*same, "eval.dataset.split=train[:2]", "dataset.split=train[:4]") == ()


def test_a_server_that_others_reach_without_a_token_is_noticed(
    monkeypatch: pytest.MonkeyPatch, recipe_folder: Path
) -> None:
    (recipe_folder / "token").touch(0o600)
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    server = ("vllm.mode=server",)
    (notice,) = notices(*server, "vllm.server_host=node7")
    assert notice == (
        "vllm.server_host: found http://node7:8000 without a token; `grpo vllm-serve` listens to other machines only with one, "
        "because whoever reaches a server can change its weights (set `vllm.token_file`, or the environment variable GRPO_VLLM_TOKEN)"
    )
    (notice,) = notices(
        *server, "vllm.server_base_urls=[http://localhost:8000, http://10.0.0.7:8000, http://10.0.0.8:8000]"
    )
    assert notice.startswith("vllm.server_base_urls: found http://10.0.0.7:8000 without a token")
    assert notices(*server) == ()
    assert notices(*server, "vllm.server_base_urls=[http://localhost:8000, 'http://[::1]:8001', https://node7]") == ()
    assert notices(*server, "vllm.server_host=node7", "vllm.token_file=token") == ()
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    assert notices(*server, "vllm.server_host=node7") == ()


def test_a_bound_of_the_built_in_engine_is_noticed_with_vllm() -> None:
    assert notices("generation.max_num_seqs=256") == ()
    (notice,) = notices("generation.max_num_seqs=256", "vllm.mode=colocate")
    assert notice == (
        "generation.max_num_seqs: found 256, which the built-in engine reads; vLLM takes as many completions at once as fit "
        "(`vllm.engine: {max_num_seqs: 256}` bounds them)"
    )


def test_an_expression_is_noticed() -> None:
    (notice,) = notices("vllm.mode=colocate", "vllm.structured_outputs_regex='(yes|no)'")
    assert notice.startswith(
        "vllm.structured_outputs_regex: found an expression; vLLM's log-probabilities are of the tokens"
    )


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("vllm.mode=colocate",), "vllm.mode: found colocate"),
        (("vllm.mode=server", "vllm.start=true"), "vllm.start: found true"),
    ],
)
def test_vllm_is_missed_only_where_it_runs_and_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, recipe_folder: Path, overrides: tuple[str, ...], expected: str
) -> None:
    def missing(*changes: str) -> str | None:
        return missing_engine(load_recipe(Path("good.yaml"), changes).recipe)

    monkeypatch.setitem(sys.modules, "vllm", None)  # no import finds it
    assert missing(*overrides) == (f"{expected}, but vLLM is not installed here; a run needs it (pip install vllm)")
    assert missing() is None
    assert missing("vllm.mode=server") is None
    monkeypatch.delitem(sys.modules, "vllm")
    monkeypatch.syspath_prepend(recipe_folder)
    (recipe_folder / "vllm").mkdir()
    (recipe_folder / "vllm" / "__init__.py").touch()
    assert missing(*overrides) is None


def test_completions_that_are_not_written_are_noticed() -> None:
    sizes = ("train.prompts_per_step=3", "grpo.num_generations=4", "grpo.steps_per_generation=2")
    (notice,) = notices(*sizes, "logging.num_completions_to_log=17")
    assert notice == (
        "logging.num_completions_to_log: found 17; of 24 completions that are sampled at once 20 are written, those of the first prompts "
        "(null writes all, logging.log_completions: false none)"
    )
    for other in ("num_completions_to_log=21", "num_completions_to_log=null"):  # 21 of them are of the last prompt, too
        assert notices(*sizes, f"logging.{other}") == ()
    assert notices(*sizes, "logging.num_completions_to_log=17", "logging.log_completions=false") == ()
