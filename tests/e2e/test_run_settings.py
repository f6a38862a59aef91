"""Settings of a whole run, each seen from outside: in metrics.jsonl, in the completions, in the final weights."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from e2e.experiment import WORDS, Experiment, completions, make_experiment, records, weights

from grpo_cli.engine.run import run
from grpo_cli.errors import RewardError
from grpo_cli.recipe.load import load_recipe


def train(experiment: Experiment, changes: Mapping[str, object], *, output: str = "run") -> Path:
    changes = {"train.output_dir": experiment.output(output), **changes}
    overrides = [f"{key}={value}" for key, value in changes.items()]
    run(load_recipe(experiment.recipe, overrides))
    return experiment.output(output)


@pytest.fixture
def experiment(tiny_model_folder: Path, tmp_path: Path) -> Experiment:
    return make_experiment(tmp_path, tiny_model_folder, rewards={"reward_funcs": ["my_rewards.few_letters"]})


def test_epochs_draw_every_row_once_each_and_end_with_what_is_left(experiment: Experiment) -> None:
    output = train(experiment, {"train.max_steps": "null", "train.num_train_epochs": 2, "train.prompts_per_step": 5})
    files = completions(output)
    uids = [{row["prompt_uid"] for row in rows} for rows in files.values()]
    assert [len(step) for step in uids] == [5, 5, 5, 5, 4]
    assert set.union(*uids) == {f"{epoch}:{row}" for epoch in (0, 1) for row in range(len(WORDS))}
    assert records(output)[-1]["epoch"] == 2.0


def test_metrics_are_what_the_completions_say(experiment: Experiment) -> None:
    """Every definition, recomputed from the parquet files."""
    output = train(experiment, {"grpo.num_generations": 4, "generation.max_completion_length": 40, "grpo.beta": 0.1})
    files = list(completions(output).values())
    drawn = 0
    for record, rows in zip(records(output), files, strict=True):
        lengths = [row["num_tokens"] for row in rows]
        stopped = [row["num_tokens"] for row in rows if row["finish_reason"] == "stop"]
        rewards = torch.tensor([row["reward/few_letters"] for row in rows], dtype=torch.float64)
        groups = rewards.reshape(-1, 4)
        drawn += sum(lengths) + sum(len(row["prompt"].encode()) for row in rows)
        expected = {
            "completions/mean_length": sum(lengths) / len(lengths),
            "completions/min_length": min(lengths),
            "completions/max_length": max(lengths),
            "completions/mean_terminated_length": sum(stopped) / len(stopped) if stopped else None,
            "completions/min_terminated_length": min(stopped) if stopped else None,
            "completions/max_terminated_length": max(stopped) if stopped else None,
            "completions/clipped_ratio": 1 - len(stopped) / len(lengths),
            "reward": rewards.mean().item(),
            "reward/few_letters/mean": rewards.mean().item(),
            "reward_std": rewards.std().item(),
            "reward/few_letters/std": rewards.std().item(),
            "frac_reward_zero_std": (groups.std(dim=1) == 0).double().mean().item(),
            "num_tokens": drawn,
        }
        for name, value in expected.items():
            assert record[name] == (None if value is None else pytest.approx(value, rel=1e-5)), name
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        found = torch.tensor([row["advantage"] for row in rows], dtype=torch.float64)
        torch.testing.assert_close(found, advantages.flatten(), rtol=1e-4, atol=1e-4)
        assert record["kl"] >= 0
        assert 0 < record["entropy"] < math.log(260)
        assert record["policy_version"] == record["step"] - 1
        assert record["staleness"] == 0
    assert records(output)[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert records(output)[-1]["kl"] > 1e-4


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"train.micro_batch_tokens": 10_000}, True),
        ({"train.gradient_checkpointing": "true"}, True),
        ({"generation.max_num_seqs": 1}, True),
        ({"train.seed": 1}, False),
        ({"train.max_grad_norm": 0.1}, False),
        ({"grpo.scale_rewards": "none"}, False),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_speed_and_memory_settings_change_nothing_and_others_do(
    changes: dict[str, Any], same: bool, experiment: Experiment
) -> None:
    base = {"train.max_steps": 3, "generation.max_completion_length": 40, "train.learning_rate": 0.001}
    expected = weights(train(experiment, base, output="base"))
    found = weights(train(experiment, {**base, **changes}, output="changed"))
    differences = [(found[name] - value).abs().max().item() for name, value in expected.items()]
    assert (max(differences) < 2e-5) is same


def test_rollouts_are_reused_for_several_steps_and_passes(experiment: Experiment) -> None:
    output = train(
        experiment,
        {"grpo.steps_per_generation": 2, "grpo.num_iterations": 2, "train.max_steps": 8, "train.save_steps": 0},
    )
    told = records(output)
    assert [record["step"] for record in told if "reward" in record] == [1, 5]
    assert [record["staleness"] for record in told] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [record["policy_version"] for record in told] == [0, 0, 0, 0, 4, 4, 4, 4]
    first_pass = [record for record in told if record["staleness"] == 0]
    assert all(record["clip_ratio/region_mean"] == 0 for record in first_pass)
    assert max(record["clip_ratio/region_mean"] for record in told) > 0
    assert len(completions(output)) == 2


def test_the_learning_rate_follows_its_schedule(experiment: Experiment) -> None:
    output = train(experiment, {"train.warmup_steps": 2, "train.learning_rate": 0.01})
    rates = [record["learning_rate"] for record in records(output)]
    assert rates == pytest.approx([0.0, 0.005, 0.01, 0.0075, 0.005, 0.0025])


@pytest.fixture
def other_precision() -> Any:
    """Accelerate allows one precision in a process; forget it before and after."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("other_precision")
def test_bf16_computes_in_bfloat16_and_keeps_float32_weights(experiment: Experiment) -> None:
    long = {"generation.max_completion_length": 40, "train.micro_batch_tokens": 500}
    output = train(experiment, {"train.bf16": "true", "train.max_steps": 2, **long})
    assert all(value.dtype == torch.float32 for value in weights(output).values())
    difference = records(output)[0]["sampling/logp_difference/max"]
    assert 1e-5 < difference < 0.5  # two bfloat16 forwards round differently, and float32 ones would agree better


def test_all_equal_rewards_teach_nothing_and_say_so(
    experiment: Experiment, capsys: pytest.CaptureFixture[str], tiny_model_folder: Path
) -> None:
    module = experiment.folder / "my_rewards.py"
    module.write_text(module.read_text() + "\n\ndef same(completions, **_):\n    return [0.3] * len(completions)\n")
    output = train(experiment, {"rewards.reward_funcs": "[my_rewards.same]"})
    before = torch.nn.Module.state_dict(load(tiny_model_folder))
    assert all(torch.equal(value, before[name]) for name, value in weights(output).items())
    printed = capsys.readouterr().out
    assert printed.count("every advantage is 0 and nothing is learned") == 2  # once when noticed, once with a count
    assert "(4 times)" in printed


def test_a_logged_metric_with_a_name_of_the_runs_own_is_refused(experiment: Experiment) -> None:
    module = experiment.folder / "my_rewards.py"
    module.write_text(
        module.read_text() + "\n\ndef logging(completions, log_metric, **_):\n    log_metric('loss', 1.0)\n"
        "    return [0.0] * len(completions)\n"
    )
    with pytest.raises(RewardError, match="'loss' is a metric of the run itself"):
        train(experiment, {"rewards.reward_funcs": "[my_rewards.logging]"})


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)
