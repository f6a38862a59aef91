"""Weights reach an engine that copies them when it samples, and no engine can serve others for long."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.experiment import Experiment, completions, make_experiment, records, timeless, weights
from engine.copying_engine import CopyingEngine, Lie, NamedWeights, truth

from grpo_cli.engine.inputs import Inputs
from grpo_cli.engine.run import run
from grpo_cli.errors import TrainingError
from grpo_cli.policy.forward import PolicyModel
from grpo_cli.recipe.load import load_recipe
from grpo_cli.telemetry.recorder import Recorder
from grpo_cli.types import PolicyVersion

NEW = ("sync/", "canary/")
"""Metrics that only an engine with a copy has."""


def train(
    experiment: Experiment,
    output: str,
    lie: Lie | None,
    *overrides: str,
    resume: str | None = None,
    drift: float = 0.0,
) -> Any:
    """Train with the local engine, or with a copying one and what it takes for the weights; give that one."""
    engines = []

    def copying(inputs: Inputs, policy: PolicyModel, recorder: Recorder) -> CopyingEngine:
        assert lie is not None
        engines.append(CopyingEngine(policy.model, inputs.tokenizer, lie=lie, drift=drift, max_num_seqs=64))
        return engines[-1]

    with pytest.MonkeyPatch.context() as monkeypatch:
        if lie is not None:
            monkeypatch.setattr("grpo_cli.engine.vllm_rollouts.open_colocated", copying)
            corrected = str(drift != 0).lower()
            overrides = ("vllm.mode=colocate", f"vllm.importance_sampling_correction={corrected}", *overrides)
        recipe = load_recipe(experiment.recipe, [f"train.output_dir={experiment.output(output)}", *overrides])
        run(recipe, resume=resume)
    return engines[0] if engines else None


def without_new(output: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if not name.startswith(NEW)} for record in timeless(output)]


def skipping(at: int) -> Lie:
    """Leave one sync out."""
    return lambda weights, version: None if version == at else weights


def stale(weights: NamedWeights, version: PolicyVersion) -> NamedWeights | None:
    """Take nothing after the first weights."""
    return weights if version == 0 else None


def swapped(weights: NamedWeights, version: PolicyVersion) -> NamedWeights:
    """Exchange two tensors of one shape."""
    by_name = dict(weights)
    first, second = (f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1))
    return [*(by_name | {first: by_name[second], second: by_name[first]}).items()]


def without_the_embedding(weights: NamedWeights, version: PolicyVersion) -> NamedWeights:
    """Keep the first embedding, which is the head's matrix too, as an engine with a copy of it might."""
    return [(name, tensor) for name, tensor in weights if version == 0 or "embed_tokens" not in name]


@pytest.fixture
def experiment(tiny_model_folder: Path, tmp_path: Path) -> Experiment:
    return make_experiment(tmp_path, tiny_model_folder)


def test_an_engine_with_a_copy_trains_as_the_one_that_shares_the_weights(experiment: Experiment) -> None:
    """Sampling, rewards with randomness and state, and the global generators see nothing of the syncs and checks."""
    held_out = ("eval.dataset.name=data.jsonl", "eval.dataset.max_rows=2", "eval.every=2")
    train(experiment, "local", None, *held_out)
    engine = train(experiment, "copy", truth, "vllm.canary_steps=2", *held_out)
    assert without_new(experiment.output("copy")) == without_new(experiment.output("local"))
    assert repr(completions(experiment.output("copy"))) == repr(completions(experiment.output("local")))
    mine, theirs = weights(experiment.output("copy")), weights(experiment.output("local"))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
    assert engine.versions == list(range(7)), "the last one for the evaluation at the end"


def test_syncs_and_checks_are_told_in_the_step_that_sampled_first(experiment: Experiment) -> None:
    train(experiment, "run", truth, "vllm.canary_steps=2")
    size = sum(tensor.nbytes for tensor in weights(experiment.output("run")).values())
    told = records(experiment.output("run"))
    assert [record.get("sync/bytes") for record in told] == [size] * 6
    checks = [record.get("canary/logp_difference/mean") for record in told]
    assert [check is not None for check in checks] == [True, False] * 3
    assert all(0 < check < 1e-4 for check in checks if check is not None)
    assert all(record["canary/logp_difference/max"] < 1e-3 for record in told[::2])


def test_steps_that_share_a_generation_sync_once(experiment: Experiment) -> None:
    engine = train(experiment, "run", truth, "grpo.steps_per_generation=2", "train.max_steps=6")
    assert engine.versions == [0, 2, 4]
    assert [record["policy_version"] for record in records(experiment.output("run"))] == [0, 0, 2, 2, 4, 4]


def test_the_canary_samples_with_a_key_of_its_own_every_so_many_syncs(experiment: Experiment) -> None:
    kinds = [
        [key[1] for key in train(experiment, f"{every}", truth, f"vllm.canary_steps={every}").calls] for every in (0, 3)
    ]
    assert kinds[0] == ["canary", *["train"] * 6]
    assert kinds[1] == [*["canary", *["train"] * 3] * 2]


@pytest.mark.parametrize(
    ("lie", "steps"), [(skipping(3), 3), (stale, 1), (without_the_embedding, 1)], ids=["skip", "stale", "tied"]
)
def test_other_weights_than_the_trainers_stop_the_run_and_lose_nothing(
    lie: Lie, steps: int, experiment: Experiment, capsys: pytest.CaptureFixture[str]
) -> None:
    train(experiment, "whole", truth)
    with pytest.raises(TrainingError) as caught:
        train(experiment, "lied", lie, "vllm.canary_steps=1")
    assert caught.value.exit_code == 4
    assert f"does not sample from the trained weights: with those of step {steps}" in str(caught.value)
    assert "--resume" in str(caught.value)
    assert f"stopped at step {steps} of 6" in capsys.readouterr().out
    train(experiment, "lied", truth, "vllm.canary_steps=1", resume="newest")
    assert without_new(experiment.output("lied")) == without_new(experiment.output("whole"))


def test_tensors_under_wrong_names_stop_the_run_before_it_begins(experiment: Experiment) -> None:
    with pytest.raises(TrainingError, match="with those of step 0"):
        train(experiment, "run", swapped)
    assert not (experiment.output("run") / "metrics.jsonl").exists()


def test_the_tolerance_is_the_recipes(experiment: Experiment) -> None:
    with pytest.raises(TrainingError, match="1e-09 on average is allowed"):
        train(experiment, "strict", truth, "vllm.canary_tolerance=1e-9")
    train(experiment, "lenient", stale, "vllm.canary_tolerance=100")


@pytest.mark.parametrize("num_iterations", [1, 2])
def test_much_that_the_correction_masks_is_told(
    num_iterations: int, experiment: Experiment, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = (
        "vllm.importance_sampling_mode=sequence_mask",
        "vllm.canary_tolerance=1",
        f"grpo.num_iterations={num_iterations}",
        "train.learning_rate=1e-6",
        "generation.min_completion_length=6",
    )
    train(experiment, "run", truth, *settings, drift=-0.3)
    for record in records(experiment.output("run")):
        assert record["sampling/logp_difference/mean"] == pytest.approx(0.3, abs=1e-3)
        assert record["sampling/importance_ratio/masked_sequences"] == 1, "e^(6 * 0.3) is above 3"
        assert record["sampling/importance_ratio/clipped_mean"] == 0
    assert "the rollout correction leaves 4 of 4 completions of this step out" in capsys.readouterr().out


def test_what_is_truncated_is_not_masked(experiment: Experiment, capsys: pytest.CaptureFixture[str]) -> None:
    train(experiment, "run", truth, "vllm.canary_tolerance=1", "train.learning_rate=1e-6", drift=-0.3)
    for record in records(experiment.output("run")):
        assert record["sampling/importance_ratio/clipped_mean"] == pytest.approx(math.exp(0.3), abs=1e-2)
        assert record["sampling/importance_ratio/masked_sequences"] == 0
    assert "the rollout correction leaves" not in capsys.readouterr().out


def test_a_product_that_truncation_leaves_next_to_nothing_of_is_told(
    experiment: Experiment, capsys: pytest.CaptureFixture[str]
) -> None:
    """Truncation bounds ratios from above alone, so a small product stays small."""
    settings = (
        "vllm.importance_sampling_mode=sequence_truncate",
        "vllm.canary_tolerance=1",
        "train.learning_rate=1e-6",
        "generation.min_completion_length=6",
    )
    train(experiment, "run", truth, *settings, drift=0.5)
    for record in records(experiment.output("run")):
        assert record["sampling/importance_ratio/clipped_mean"] == pytest.approx(math.exp(-6 * 0.5), rel=0.05)
        assert record["sampling/importance_ratio/masked_sequences"] == 1
    assert "the rollout correction leaves 4 of 4 completions of this step out" in capsys.readouterr().out


def test_least_lengths_do_not_disturb_the_check(experiment: Experiment) -> None:
    """Stop tokens are banned at the beginning on both sides, or a truthful engine would seem to lie."""
    train(experiment, "run", truth, "generation.min_completion_length=6")
    assert any("canary/logp_difference/mean" in record for record in records(experiment.output("run")))


def test_weights_that_are_one_small_step_old_are_noticed(experiment: Experiment) -> None:
    """What rounding does is known after the first check, and is far less than a step's change."""
    with pytest.raises(TrainingError, match="does not sample from the trained weights"):
        train(experiment, "run", stale, "train.learning_rate=1e-4", "vllm.canary_steps=1")
