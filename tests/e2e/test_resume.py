"""Resume is exact: a run that is stopped at every step and resumed each time equals one that was never stopped, bit for bit.

The whole line is real: recipe, tokenizer, model, local engine, rewards that draw from the global generators and one that
counts its calls, AdamW, schedule, checkpoints on disk. Stops are real signals.
"""

import itertools
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from e2e.experiment import Experiment, assert_same_run, make_experiment, records, weights

from grpo_cli.engine.checkpoint_store import CheckpointStore
from grpo_cli.engine.manifest import damage
from grpo_cli.engine.run import run
from grpo_cli.engine.trainer import Trainer
from grpo_cli.errors import CheckpointError, Interrupted, TrainingError
from grpo_cli.recipe.load import load_recipe

STEPS = 6


def train(
    experiment: Experiment, output: str, changes: Mapping[str, object] | None = None, *, resume: str | None = None
) -> None:
    changes = {"train.output_dir": experiment.output(output), **(changes or {})}
    overrides = [f"{key}={value}" for key, value in changes.items()]
    run(load_recipe(experiment.recipe, overrides, resumes=resume is not None), resume=resume)


def stop_after(step: int, monkeypatch: pytest.MonkeyPatch, *, times: int = 1) -> None:
    """Send this process a SIGTERM when the step is done, or more of them."""
    whole = Trainer._train_step

    def train_step(self: Trainer) -> None:
        whole(self)
        if self.state.step == step:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Trainer, "_train_step", train_step)


def stop_at_every_step(
    experiment: Experiment,
    output: str,
    changes: Mapping[str, object] | None = None,
    *,
    after: Callable[[], object] = lambda: None,
) -> None:
    """Train with a stop after each step; the first and every later start is `--resume`. After the first stop something may happen."""
    for step in range(1, STEPS):
        with pytest.MonkeyPatch.context() as monkeypatch:
            stop_after(step, monkeypatch)
            with pytest.raises(Interrupted) as caught:
                train(experiment, output, changes, resume="newest")
            assert caught.value.exit_code == 143
        if step == 1:
            after()
    train(experiment, output, changes, resume="newest")


def test_a_signal_that_slurm_repeats_does_not_cut_the_saving_off(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the second one would end this process."""
    experiment = make_experiment(tmp_path, tiny_model_folder)
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    stop_after(2, monkeypatch, times=2)
    with pytest.raises(Interrupted):
        train(experiment, "run")
    assert damage(experiment.output() / "checkpoints" / "step-000002") is None


# 12 rows, 2 prompts a step: epoch 2 begins after step 6 / num_iterations, so the second setting crosses it.
VALUES = ((1, 4), (1, 2), (1, 2), (False, True), (False, True))
MATRIX = [
    tuple(values[choice] for values, choice in zip(VALUES, choices, strict=True))
    for choices in itertools.product((0, 1), repeat=len(VALUES))
    if sum(choices) % 2 == 0
]
"""Half of all combinations: among these, any four of the five settings have all of theirs."""


@pytest.mark.parametrize(("steps_per_generation", "num_iterations", "epochs", "streaming", "moving_reference"), MATRIX)
def test_stopping_at_every_step_changes_nothing(
    steps_per_generation: int,
    num_iterations: int,
    epochs: int,
    streaming: bool,
    moving_reference: bool,
    tiny_model_folder: Path,
    tmp_path: Path,
) -> None:
    experiment = make_experiment(
        tmp_path,
        tiny_model_folder,
        dataset={"streaming": streaming, "max_rows": 4 if epochs == 2 else 12, "shuffle_buffer_size": 5},
        grpo={
            "num_generations": 2,
            "steps_per_generation": steps_per_generation,
            "num_iterations": num_iterations,
            **({"beta": 0.05, "sync_ref_model": True, "ref_model_sync_steps": 2} if moving_reference else {}),
        },
        train={"gradient_checkpointing": False},  # a third of the time of runs as small as these; the others have it
    )
    train(experiment, "whole")
    stop_at_every_step(experiment, "stopped")
    assert_same_run(experiment.output("stopped"), experiment.output("whole"))
    epoch = max(record.get("epoch", 0) for record in records(experiment.output("whole")))
    if not streaming:
        assert (epoch > 1) == (epochs == 2)


def test_adapters_are_resumed_exactly_and_checkpoints_hold_them_alone(tiny_model_folder: Path, tmp_path: Path) -> None:
    experiment = make_experiment(
        tmp_path,
        tiny_model_folder,
        model={"lora": {"r": 2}},
        grpo={"num_generations": 2, "steps_per_generation": 2, "beta": 0.05},
        train={"save_steps": 2},
    )
    train(experiment, "whole")
    stop_at_every_step(experiment, "stopped")
    assert_same_run(experiment.output("stopped"), experiment.output("whole"))
    told = records(experiment.output("whole"))
    assert told[0]["kl"] == pytest.approx(0, abs=1e-6), "the reference is the model without its adapters"
    assert told[-1]["kl"] > 1e-3
    saved = experiment.output("whole") / "checkpoints" / "step-000006"
    assert not list(saved.rglob("model.safetensors"))
    assert (saved / "model" / "adapter_config.json").is_file()
    with pytest.raises(CheckpointError, match=r"model\.lora\.r was 2 in the checkpoint's run, is 4"):
        train(experiment, "whole", {"model.lora.r": 4}, resume="newest")
    with pytest.raises(CheckpointError, match=r"model\.lora was .* in the checkpoint's run, is null"):
        train(experiment, "whole", {"model.lora": "null"}, resume="newest")


@pytest.mark.parametrize("step", [0, 2])
def test_a_signal_in_the_middle_of_a_step_changes_nothing(
    step: int, tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = make_experiment(tmp_path, tiny_model_folder)
    train(experiment, "whole")
    monkeypatch.setenv("STOP_WHILE_SCORING", str(step))
    with pytest.raises(Interrupted):
        train(experiment, "stopped")
    done = records(experiment.output("stopped")) if step else []
    assert [record["step"] for record in done] == list(range(1, step + 1))
    train(experiment, "stopped", resume="newest")
    assert_same_run(experiment.output("stopped"), experiment.output("whole"))


def test_evaluation_changes_nothing_and_is_resumed_too(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = make_experiment(tmp_path, tiny_model_folder)
    train(experiment, "without")
    held_out = {"eval.dataset.name": "data.jsonl", "eval.dataset.max_rows": 3, "eval.every": 2, "eval.temperature": 1.0}
    train(experiment, "whole", held_out)
    training = [record for record in records(experiment.output("whole")) if "loss" in record]
    assert [record["loss"] for record in training] == [
        record["loss"] for record in records(experiment.output("without"))
    ]

    evaluations = [record for record in records(experiment.output("whole")) if "eval/reward" in record]
    assert [record["step"] for record in evaluations] == [0, 2, 4, 6]
    for step in (2, 3, 4):
        with pytest.MonkeyPatch.context() as patch:
            stop_after(step, patch)
            with pytest.raises(Interrupted):
                train(experiment, "stopped", held_out, resume="newest")
    train(experiment, "stopped", held_out, resume="newest")
    assert_same_run(experiment.output("stopped"), experiment.output("whole"))


def test_the_best_checkpoint_is_kept(tiny_model_folder: Path, tmp_path: Path) -> None:
    experiment = make_experiment(
        tmp_path,
        tiny_model_folder,
        rewards={"reward_funcs": ["my_rewards.few_letters"]},
        eval={"dataset": {"name": "data.jsonl", "max_rows": 4}, "every": 1, "temperature": 1.0},
        train={
            "prompts_per_step": 2, "max_steps": 6, "learning_rate": 0.01, "keep_checkpoints": 1, "save_steps": 1,
            "output_dir": str(tmp_path / "run"),
        },
    )  # fmt: skip
    run(load_recipe(experiment.recipe))
    evaluations = [record for record in records(experiment.output()) if "eval/reward" in record]
    best = max(evaluations[1:], key=lambda record: (record["eval/reward"], -record["step"]))
    kept = {path.name for path in (experiment.output() / "checkpoints").glob("step-*")}
    first = evaluations[0]["eval/reward"]
    expected = {"step-000006"} | ({f"step-{best['step']:06d}"} if best["eval/reward"] > first else set())
    assert kept == expected
    assert all(damage(experiment.output() / "checkpoints" / name) is None for name in kept)


def test_a_damaged_newest_checkpoint_is_passed_over(
    tiny_model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = make_experiment(tmp_path, tiny_model_folder)
    train(experiment, "whole")
    train(experiment, "damaged", {"train.save_steps": 2})
    newest = experiment.output("damaged") / "checkpoints" / "step-000006"
    (newest / "state.json").write_text("{}")
    train(experiment, "damaged", {"train.save_steps": 2}, resume="newest")
    assert "passing over checkpoint step-000006: state.json has 2 bytes" in capsys.readouterr().out
    assert_same_run(experiment.output("damaged"), experiment.output("whole"))


def test_resume_from_a_named_checkpoint_starts_there(tiny_model_folder: Path, tmp_path: Path) -> None:
    experiment = make_experiment(tmp_path, tiny_model_folder)
    train(experiment, "whole", {"train.save_steps": 2})
    final = weights(experiment.output("whole"))
    checkpoint = experiment.output("whole") / "checkpoints" / "step-000002"
    train(experiment, "elsewhere", resume=str(checkpoint))
    assert [record["step"] for record in records(experiment.output("elsewhere"))] == [3, 4, 5, 6]
    assert all((value == final[name]).all() for name, value in weights(experiment.output("elsewhere")).items())


def test_a_finished_run_is_not_overwritten(tiny_model_folder: Path, tmp_path: Path) -> None:
    experiment = make_experiment(tmp_path, tiny_model_folder)
    train(experiment, "run", {"train.max_steps": 1})
    with pytest.raises(CheckpointError, match="already holds a run"):
        train(experiment, "run", {"train.max_steps": 1})
    train(experiment, "run", {"train.max_steps": 1, "train.overwrite_output_dir": "true"})


def test_a_checkpoint_is_not_removed_by_the_run_that_starts_from_it(tiny_model_folder: Path, tmp_path: Path) -> None:
    experiment = make_experiment(tmp_path, tiny_model_folder)
    train(experiment, "whole")
    train(experiment, "again", {"train.save_steps": 2})
    roundabout = experiment.output("again") / ".." / "again" / "checkpoints" / "step-000002"
    train(experiment, "again", {"train.overwrite_output_dir": "true"}, resume=str(roundabout))
    assert_same_run(experiment.output("again"), experiment.output("whole"))


def test_a_changed_recipe_is_told_and_what_cannot_change_is_refused(
    tiny_model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = make_experiment(tmp_path, tiny_model_folder)
    with pytest.MonkeyPatch.context() as monkeypatch:
        stop_after(2, monkeypatch)
        with pytest.raises(Interrupted):
            train(experiment, "run")
    with pytest.raises(CheckpointError, match=r'--resume: model\.dtype was "float32"'):
        train(experiment, "run", {"model.dtype": "bfloat16", "train.learning_rate": 0.1}, resume="newest")
    capsys.readouterr()
    train(experiment, "run", {"train.learning_rate": 0.1}, resume="newest")
    assert "resuming with a changed recipe: train.learning_rate was 0.01, is 0.1" in capsys.readouterr().out
    rates = [record["learning_rate"] for record in records(experiment.output())]
    assert rates == pytest.approx([0.01, 0.01 * 5 / 6, 0.1 * 4 / 6, 0.1 * 3 / 6, 0.1 * 2 / 6, 0.1 * 1 / 6])


def test_an_unknown_best_metric_ends_the_first_evaluation(tiny_model_folder: Path, tmp_path: Path) -> None:
    experiment = make_experiment(tmp_path, tiny_model_folder, eval={"dataset": {"name": "data.jsonl"}})
    with pytest.raises(TrainingError, match=r"there is no metric eval/typo"):
        train(experiment, "run", {"eval.best_metric": "eval/typo"})


def test_a_best_metric_that_is_missing_for_once_picks_nothing_and_ends_nothing(
    tiny_model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = make_experiment(tmp_path, tiny_model_folder, eval={"dataset": {"name": "data.jsonl"}, "every": 1})
    (tmp_path / "sometimes_rewards.py").write_text(
        "def logged(completions, trainer_state, log_metric, **_):\n"
        "    if trainer_state.global_step != 1:\n"
        "        log_metric('solved', float(trainer_state.global_step))\n"
        "    return [0.0] * len(completions)\n"
    )
    train(
        experiment,
        "run",
        {
            "eval.best_metric": "eval/solved",
            "rewards.reward_funcs": "[sometimes_rewards.logged, my_rewards.noisy]",
            "train.max_steps": 2,
        },
    )
    output = capsys.readouterr().out
    assert (
        "eval.best_metric: the evaluation at step 1 has no metric eval/solved, and picks no best checkpoint" in output
    )
    best = CheckpointStore(experiment.output() / "checkpoints", keep=1).best
    assert best is not None
    assert (best.step, best.value) == (2, 2.0)


def test_a_dataset_that_changed_is_noticed(tiny_model_folder: Path, tmp_path: Path) -> None:
    experiment = make_experiment(tmp_path, tiny_model_folder)
    with pytest.MonkeyPatch.context() as monkeypatch:
        stop_after(2, monkeypatch)
        with pytest.raises(Interrupted):
            train(experiment, "run")
    lines = (tmp_path / "data.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "data.jsonl").write_text("".join(lines[1:]))
    with pytest.raises(Exception, match="not the one that the checkpoint was made with"):
        train(experiment, "run", resume="newest")
