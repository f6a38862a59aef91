"""What `vllm:` allows: every mode as it stands, corrections as the objective takes them, addresses that can be connected to."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from urllib.request import Request

import pytest

from grpo_cli.errors import TrainingError
from grpo_cli.objective.catalog import row
from grpo_cli.objective.correction import CorrectionMode, CorrectionSettings
from grpo_cli.objective.ratio import RatioLevel
from grpo_cli.objective.settings import LossType, ObjectiveSettings
from grpo_cli.recipe.addresses import is_base_url, is_loopback, server_addresses
from grpo_cli.recipe.kinds import fields_of
from grpo_cli.recipe.load import load_recipe
from grpo_cli.recipe.schema import VllmSection
from grpo_cli.recipe.summary import summary
from grpo_cli.recipe.vllm_rules import ENGINE_ARGUMENTS
from grpo_cli.rollout.vllm.sampling import sampling_fields
from grpo_cli.types import Sampling

pytestmark = pytest.mark.usefixtures("recipe_folder")

Report = Callable[..., str]
CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def section(*overrides: str) -> VllmSection:
    return load_recipe(Path("good.yaml"), overrides).recipe.vllm


@pytest.mark.parametrize(
    "changes",
    [
        "vllm: {mode: server}",
        "vllm: {mode: server, start: true, server_host: localhost, tensor_parallel_size: 2, data_parallel_size: 2}",
        "vllm: {mode: server, server_base_urls: [http://localhost:8000, https://node7/], token_file: token}",
        "vllm: {mode: server, weight_transport: process_group, group_host: 10.0.0.1, group_port: 29500}",
        "vllm: {mode: colocate, enable_sleep_mode: true, engine: {max_num_batched_tokens: 8192}}",
        "vllm: {mode: colocate, tensor_parallel_size: 2}",
        "vllm: {mode: colocate, importance_sampling_clip_min: 0.5, importance_sampling_clip_max: null}",
        "vllm: {mode: colocate, importance_sampling_clip_min: 0.5, importance_sampling_clip_max: 1}",
        "vllm: {mode: colocate, importance_sampling_correction: false, canary_steps: 0}",
        "vllm: {mode: colocate, max_model_length: 257}",
        "vllm: {mode: colocate, max_model_length: 512}\ndataset: {max_prompt_length: 256}",
        "vllm: {mode: colocate, structured_outputs_regex: '[[]a|b]+'}",
        "vllm: {mode: colocate}\ngrpo: {off_policy_mask_threshold: 0.5}",
    ],
)
def test_is_allowed(changes: str, report: Report, recipe_folder: Path) -> None:
    (recipe_folder / "token").touch(0o600)
    assert report(f"{changes}\n") == ""


def test_drift_within_one_step_is_measured_only_by_a_correction(report: Report) -> None:
    changes = "grpo: {off_policy_mask_threshold: 0.5}\nvllm: {mode: colocate, importance_sampling_correction: false}\n"
    assert "grpo.off_policy_mask_threshold: found 0.5, but each generation is used for one step" in report(changes)


@pytest.mark.parametrize(("loss", "correction"), list(product(LossType, CORRECTIONS)))
def test_a_correction_is_refused_exactly_where_the_objective_does(
    loss: LossType, correction: str, report: Report
) -> None:
    level, _, mode = correction.partition("_")
    ratios = RatioLevel.SEQUENCE if loss == LossType.LUSPO else RatioLevel.TOKEN
    settings = ObjectiveSettings(
        loss_type=loss,
        importance_sampling_level=ratios,
        max_completion_length=8,
        correction=CorrectionSettings(level=RatioLevel(level), mode=CorrectionMode(mode)),
    )
    ceiling = ", epsilon_high: 5" if loss == LossType.CISPO else ""
    reported = report(
        f"grpo: {{loss_type: {loss}, importance_sampling_level: {ratios}{ceiling}}}\n"
        f"vllm: {{mode: server, importance_sampling_mode: {correction}}}\n"
    )
    try:
        row(settings)
    except ValueError:
        assert reported.startswith("recipe.yaml:3: vllm.importance_sampling_mode: ")
    else:
        assert reported == ""


@pytest.mark.parametrize("temperature", [0.0, 0.005, 0.01, 1.0, 2.0, 2.01])
@pytest.mark.parametrize(("top_p", "min_p"), [(1.0, 0.0), (0.9, 0.0), (1.0, 0.1), (0.9, 0.1)])
def test_sampling_is_refused_exactly_where_the_engine_does(
    temperature: float, top_p: float, min_p: float, report: Report
) -> None:
    sampling = Sampling(temperature=temperature, top_p=top_p, min_p=min_p, stop_ids=(), max_tokens=8)
    try:
        sampling_fields(sampling, n=1, seed=0)
    except TrainingError:
        refused = True
    else:
        refused = False
    said = f"{{temperature: {temperature}, top_p: {top_p}, min_p: {min_p}}}"
    if temperature > 0:
        assert bool(report(f"generation: {said}\nvllm: {{mode: server}}\n")) == refused
        assert report(f"generation: {said}\n") == ""
    elif top_p == 1 and min_p == 0:  # anything else is idle with temperature 0, and reported as that
        assert not refused
    else:
        return
    rows = f"dataset: {{name: prompts.jsonl, split: test}}, {said[1:-1]}"
    assert bool(report(f"eval: {{{rows}}}\nvllm: {{mode: colocate}}\n")) == refused


def test_a_temperature_that_nothing_is_evaluated_with_is_not_looked_at_by_vllms_rules(report: Report) -> None:
    assert "vLLM" not in report("eval: {temperature: 5}\nvllm: {mode: colocate}\n")


def test_arguments_with_a_key_of_their_own_name_one_that_exists() -> None:
    recipe = load_recipe(Path("good.yaml")).recipe
    for key in ENGINE_ARGUMENTS.values():
        parent, _, name = key.partition(".")
        assert name in fields_of(type(getattr(recipe, parent))), key


def test_addresses_are_those_of_the_list_or_of_host_and_port() -> None:
    assert server_addresses(section("vllm.mode=server")) == ("http://127.0.0.1:8000",)
    assert server_addresses(section("vllm.mode=server", "vllm.server_host='::1'", "vllm.server_port=9")) == (
        "http://[::1]:9",
    )
    several = section("vllm.mode=server", "vllm.server_base_urls=[http://node7:8000/, https://node8]")
    assert server_addresses(several) == ("http://node7:8000", "https://node8")


@pytest.mark.parametrize(
    "url", ["http://a", "https://a.b-c:1", "http://10.0.0.1:8000/", "http://[::1]:8000", "HTTP://Node7"]
)
def test_a_base_url_is_one_and_names_its_host(url: str) -> None:
    assert is_base_url(url)
    assert Request(url).host in url


@pytest.mark.parametrize(
    "url",
    [
        "",
        "a",
        "a:8000",
        "//a",
        "http:a",
        "http://",
        "http://a:0",
        "http://a:x",
        "http://a?b",
        "http://a#b",
        " http://a",
    ],
)
def test_other_text_is_no_base_url(url: str) -> None:
    assert not is_base_url(url)


def test_loopback_is_this_machine_only() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "localhost", "LOCALHOST")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "node7", "localhost.example.org", "")))


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (("vllm.mode=colocate",), "  engine   vLLM in the training process"),
        (
            ("vllm.mode=colocate", "vllm.tensor_parallel_size=2"),
            "  engine   vLLM in every 2 training processes",
        ),
        (("vllm.mode=server",), "  engine   vLLM at http://127.0.0.1:8000"),
        (
            ("vllm.mode=server", "vllm.start=true", "vllm.server_port=9"),
            "  engine   vLLM at http://127.0.0.1:9, started and ended with the run",
        ),
        (
            ("vllm.mode=server", "vllm.server_base_urls=[http://localhost:1, http://localhost:2]"),
            "  engine   vLLM at http://localhost:1, http://localhost:2",
        ),
    ],
)
def test_the_summary_names_the_engine(overrides: tuple[str, ...], line: str) -> None:
    assert summary(load_recipe(Path("good.yaml"), overrides).recipe).splitlines()[3:] == [line]
