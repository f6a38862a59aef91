"""The recorder as the trainer sees it: what lies in the run directory, what the console says, what a resume forgets."""

import importlib.util
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from grpo_cli.errors import RecipeError, TrainingError
from grpo_cli.metrics import Max, Mean, MetricValue, Sum
from grpo_cli.recipe.schema import LoggingSection
from grpo_cli.telemetry.completions import completion_table
from grpo_cli.telemetry.console import open_view
from grpo_cli.telemetry.recorder import Evaluation, Recorder, Rollouts, RunSummary, is_recorded, step_numbers
from grpo_cli.types import ScoredGroup, StepReport

Maker = Callable[..., ScoredGroup]
RecorderMaker = Callable[..., Recorder]


@pytest.fixture
def make_recorder(tmp_path: Path, plain_console: Console) -> RecorderMaker:
    def make(**settings: Any) -> Recorder:
        return Recorder(
            output_dir=tmp_path,
            settings=LoggingSection(**settings),
            view=open_view(plain_console, 30),
            reward_names=["length"],
            run_name="quick",
            recipe={"run_name": "quick"},
        )

    return make


def _report(step: int, **metrics: MetricValue) -> StepReport:
    return StepReport(step=step, metrics=metrics, seconds={"forward_backward": 1.5, "step": 2.0})


def _tables(rollouts: Rollouts) -> dict[str | None, Any]:
    """Give completions as an evaluation of a dataset without a name has them."""
    return {None: completion_table(rollouts.scored, ["length"], step=0)}


def _records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_step_becomes_numbers_in_the_order_of_the_table() -> None:
    report = StepReport(
        step=3,
        metrics={
            "zeta": Mean(1, 2),
            "loss": Sum(0.25),
            "tokens/useful": Sum(300),
            "reward/b/mean": Mean(2, 2),
            "reward/a/mean": Mean(1, 2),
            "completions/max_length": Max(9),
            "alpha": Sum(1),
            "reward": Mean(3, 2),
        },
        seconds={"sync": 0.25, "forward_backward": 1.5, "step": 2.0},
    )
    assert list(step_numbers(report).items()) == [
        ("reward", 1.5),
        ("reward/a/mean", 0.5),
        ("reward/b/mean", 1.0),
        ("loss", 0.25),
        ("completions/max_length", 9),
        ("tokens/useful", 300),
        ("tokens_per_second", 150.0),
        ("step_time", 2.0),
        ("time/forward_backward", 1.5),
        ("time/sync", 0.25),
        ("alpha", 1),
        ("zeta", 0.5),
    ]


def test_numbers_that_json_lacks_become_null(make_recorder: RecorderMaker, tmp_path: Path) -> None:
    recorder = make_recorder()
    recorder.record_step(_report(1, reward=Mean(0, 0), loss=Sum(math.inf), grad_norm=Mean(1, 2)))
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"step": 1, "reward": null, "loss": null, "grad_norm": 0.5, "step_time": 2.0, "time/forward_backward": 1.5}\n'
    )


def test_a_run_leaves_one_object_per_step_and_evaluation_and_a_file_per_generation(
    make_recorder: RecorderMaker, make_scored: Maker, tmp_path: Path
) -> None:
    recorder = make_recorder()
    rollouts = Rollouts(scored=[make_scored("ab", [[0.0], [1.0]])], advantages=[torch.tensor([-1.0, 1.0])])
    evaluation = {"eval/reward": 0.5, "eval/reward/length/mean": math.nan}
    recorder.record_evaluation(Evaluation(step=0, metrics=evaluation, tables=_tables(rollouts)))
    recorder.record_step(_report(1, reward=Mean(1, 2)), rollouts)
    recorder.record_step(_report(2, loss=Sum(0.1)))
    recorder.record_evaluation(Evaluation(step=2, metrics=evaluation, tables=_tables(rollouts)))
    recorder.close()
    assert _tree(tmp_path) == [
        "completions/train-000001.parquet",
        "eval/000000.parquet",
        "eval/000002.parquet",
        "metrics.jsonl",
    ]
    times = {"step_time": 2.0, "time/forward_backward": 1.5}
    assert _records(tmp_path) == [
        {"step": 0, "eval/reward": 0.5, "eval/reward/length/mean": None},
        {"step": 1, "reward": 0.5, **times},
        {"step": 2, "loss": 0.1, **times},
        {"step": 2, "eval/reward": 0.5, "eval/reward/length/mean": None},
    ]


def test_completions_are_not_written_when_they_are_not_wanted(
    make_recorder: RecorderMaker, make_scored: Maker, tmp_path: Path
) -> None:
    recorder = make_recorder(log_completions=False)
    rollouts = Rollouts(scored=[make_scored("ab", [[0.0], [1.0]])], advantages=[torch.zeros(2)])
    recorder.record_step(_report(1), rollouts)
    recorder.record_evaluation(Evaluation(step=1, metrics={"eval/reward": 0.5}, tables=_tables(rollouts)))
    assert _tree(tmp_path) == ["metrics.jsonl"]


@pytest.mark.parametrize(
    ("evaluated", "records", "evaluations"),
    [
        (True, [(0, True), (1, False), (2, False), (2, True)], ["eval/000000.parquet", "eval/000002.parquet"]),
        (False, [(0, True), (1, False), (2, False)], ["eval/000000.parquet"]),
    ],
)
def test_a_resume_forgets_what_will_be_done_again_and_nothing_else(
    make_recorder: RecorderMaker,
    make_scored: Maker,
    tmp_path: Path,
    evaluated: bool,
    records: list[tuple[int, bool]],
    evaluations: list[str],
) -> None:
    killed = make_recorder()
    rollouts = Rollouts(scored=[make_scored("ab", [[0.0], [1.0]])], advantages=[torch.zeros(2)])
    killed.record_evaluation(Evaluation(step=0, metrics={"eval/reward": 0.0}, tables=_tables(rollouts)))
    for step in (1, 2, 3):
        killed.record_step(_report(step), rollouts)
        if step >= 2:
            killed.record_evaluation(Evaluation(step=step, metrics={"eval/reward": 0.0}, tables=_tables(rollouts)))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')

    resumed = make_recorder()
    resumed.resume_at(2, evaluated=evaluated)
    assert [(record["step"], "eval/reward" in record) for record in _records(tmp_path)] == records
    assert _tree(tmp_path) == [
        "completions/train-000001.parquet",
        "completions/train-000002.parquet",
        *evaluations,
        "metrics.jsonl",
    ]
    resumed.record_step(_report(3))
    assert [record["step"] for record in _records(tmp_path)] == [*(step for step, _ in records), 3]


def test_a_run_killed_before_its_first_checkpoint_begins_with_an_empty_record(
    make_recorder: RecorderMaker, tmp_path: Path
) -> None:
    killed = make_recorder()
    killed.record_evaluation(Evaluation(step=0, metrics={"eval/reward": 0.0}, tables={}))
    killed.record_step(_report(1))
    make_recorder().resume_at(0, evaluated=False)
    assert _records(tmp_path) == []


def test_samples_are_shown_at_every_multiple_or_at_the_next_generation(
    make_recorder: RecorderMaker, make_scored: Maker, written: Callable[[], str]
) -> None:
    rollouts = Rollouts(scored=[make_scored("ab", [[0.0], [1.0]])], advantages=[torch.tensor([-1.0, 1.0])])
    recorder = make_recorder(print_completions_steps=10)
    recorder.resume_at(9)
    for step in range(9, 34):
        recorder.record_step(_report(step), rollouts if step in {9, 10, 11, 17, 25, 33} else None)
    shown = [line.strip() for line in written().splitlines() if "samples" in line]
    assert shown == ["samples of step 10", "samples of step 25", "samples of step 33"]


@pytest.mark.parametrize(("every", "steps_per_window"), [(1, 1), (3, 1), (3, 2), (2, 4), (10, 4), (4, 4)])
def test_completions_are_asked_for_where_samples_are_shown_and_nowhere_else(
    make_recorder: RecorderMaker, make_scored: Maker, written: Callable[[], str], every: int, steps_per_window: int
) -> None:
    """So that processes that scored them need not send them when nobody looks."""
    rollouts = Rollouts(scored=[make_scored("ab", [[0.0], [1.0]])], advantages=[torch.tensor([-1.0, 1.0])])
    recorder, generating = make_recorder(print_completions_steps=every), range(1, 40, steps_per_window)
    for step in range(1, 40):
        recorder.record_step(_report(step), rollouts if step in generating else None)
    shown = [int(line.split()[-1]) for line in written().splitlines() if "samples of step" in line]
    settings = LoggingSection(print_completions_steps=every, log_completions=False)
    assert shown == [step for step in generating if is_recorded(settings, steps_per_window, step - 1)]
    assert all(is_recorded(LoggingSection(print_completions_steps=every), 1, step) for step in range(40))


def test_samples_can_be_switched_off(
    make_recorder: RecorderMaker, make_scored: Maker, written: Callable[[], str]
) -> None:
    recorder = make_recorder(print_completions_steps=0)
    recorder.record_step(_report(10), Rollouts(scored=[make_scored("a", [[0.0]])], advantages=[torch.zeros(1)]))
    assert "samples" not in written()


def test_repeated_warnings_are_counted_and_told_at_the_end(
    make_recorder: RecorderMaker, written: Callable[[], str]
) -> None:
    recorder = make_recorder()
    for _ in range(3):
        recorder.warn("health/equal", "all rewards were equal")
    assert written() == "warning: all rewards were equal\n"
    state = json.loads(json.dumps(recorder.state_dict()))
    recorder.close()
    recorder.close()
    assert written() == "warning: all rewards were equal\nwarning: all rewards were equal (3 times)\n"
    resumed = make_recorder()
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state


def test_the_end_of_a_run_is_told(
    make_recorder: RecorderMaker, make_scored: Maker, tmp_path: Path, written: Callable[[], str]
) -> None:
    recorder = make_recorder()
    rollouts = Rollouts(scored=[make_scored("ab", [[0.0], [1.0]])], advantages=[torch.zeros(2)])
    for step, reward in enumerate([-4.0, -4.2, -3.8, -1.0, -1.2, -0.8], start=1):
        recorder.record_step(_report(step, reward=Mean(reward, 1)), rollouts)
    said = len(written())
    recorder.finish(RunSummary(steps_done=6, total_steps=6, seconds=90, final_model=tmp_path / "final"))
    assert written()[said:] == (
        "finished 6 of 6 steps in 1m 30s\n"
        "reward rose from -4.00 ± 0.12 (steps 1-3) to -1.00 ± 0.12 (steps 4-6)\n"
        f"  model        {tmp_path / 'final'}\n"
        f"  metrics      {tmp_path / 'metrics.jsonl'}\n"
        f"  completions  {tmp_path / 'completions'}\n"
    )


def test_a_run_that_stopped_before_its_first_step_can_be_finished_too(
    make_recorder: RecorderMaker, written: Callable[[], str]
) -> None:
    make_recorder().finish(RunSummary(steps_done=0, total_steps=30, seconds=3.0))
    assert written() == (
        "stopped at step 0 of 30 after 3.0s; resume with the same command and --resume\nno reward was recorded\n"
    )


def test_tensorboard_follows_a_resume(make_recorder: RecorderMaker, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = make_recorder(report_to=["tensorboard"])
    first.phase("generate")
    for step in (1, 2, 3):
        first.record_step(_report(step, reward=Mean(step, 1)))
    first.close()
    second = make_recorder(report_to=["tensorboard"])
    second.load_state_dict(first.state_dict())
    second.resume_at(2)
    second.record_step(_report(3, reward=Mean(30, 1)))
    second.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_a_run_that_starts_from_another_one_has_its_own_id_and_shows_its_recipe(
    make_recorder: RecorderMaker, tmp_path: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = make_recorder()
    state = first.state_dict()
    continued, forked = make_recorder(), make_recorder(report_to=["tensorboard"])
    continued.load_state_dict(state)
    forked.load_state_dict(state, new_run=True)
    assert continued.state_dict()["run_id"] == state["run_id"]
    assert forked.state_dict()["run_id"] != state["run_id"]
    assert forked.state_dict()["warnings"] == state["warnings"]
    forked.resume_at(2)
    forked.record_step(_report(3, reward=Mean(1, 1)))
    forked.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["tensors"] == ["recipe/text_summary"]


def test_a_missing_tracker_is_found_before_anything_is_recorded(make_recorder: RecorderMaker) -> None:
    if importlib.util.find_spec("trackio") is not None:
        pytest.skip("trackio is installed")
    with pytest.raises(RecipeError, match="'trackio' needs a package that is not installed"):
        make_recorder(report_to=["tensorboard", "trackio"])


def test_files_come_before_the_console(
    make_recorder: RecorderMaker, tmp_path: Path, written: Callable[[], str]
) -> None:
    """A step that could not be recorded is not shown as done."""
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(TrainingError, match=r"cannot write .*metrics\.jsonl"):
        make_recorder().record_step(_report(1))
    assert written() == ""
