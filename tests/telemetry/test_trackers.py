"""Trackers: TensorBoard's event files read back, missing packages, failures that do not end a run."""

import importlib.util
import math
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from grpo_cli.errors import Interrupted, RecipeError
from grpo_cli.telemetry import trackers
from grpo_cli.telemetry.trackers import TrackedRun, Trackers, require_trackers


def _run(folder: Path, *, resumed_at: int | None = None) -> TrackedRun:
    return TrackedRun(
        output_dir=folder, project="p", name="quick", id="0a1b", recipe={"grpo": {"beta": 0.5}}, resumed_at=resumed_at
    )


def _fail(key: str, message: str) -> None:
    pytest.fail(f"{key}: {message}")


def _scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Read scalars back: step and value by tag. Event files hold float32; the values used here fit exactly."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_events_read_back(tmp_path: Path) -> None:
    group = Trackers(["tensorboard"], _run(tmp_path), warn=_fail)
    group.log(1, {"reward": -1.5, "completions/mean_length": 20.0, "kl": math.nan})
    group.log(2, {"reward": -1.0})
    group.close()
    assert _scalars(tmp_path) == {"reward": [(1, -1.5), (2, -1.0)], "completions/mean_length": [(1, 20.0)]}


def test_tensorboard_forgets_what_a_resumed_run_does_again(tmp_path: Path) -> None:
    first = Trackers(["tensorboard"], _run(tmp_path), warn=_fail)
    for step in range(1, 6):
        first.log(step, {"reward": float(step)})
    first.close()
    second = Trackers(["tensorboard"], _run(tmp_path, resumed_at=3), warn=_fail)
    second.log(4, {"reward": 40.0})
    second.close()
    assert _scalars(tmp_path) == {"reward": [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]}


def test_tensorboard_shows_the_recipe(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    Trackers(["tensorboard"], _run(tmp_path), warn=_fail).close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (text,) = events.Tensors("recipe/text_summary")
    assert text.tensor_proto.string_val[0].decode() == "    grpo:\n      beta: 0.5"


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_that_is_not_installed_is_an_error_of_the_recipe(name: str) -> None:
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed")
    with pytest.raises(RecipeError) as caught:
        require_trackers(["tensorboard", name])
    assert str(caught.value) == (
        f"recipe: logging.report_to: {name!r} needs a package that is not installed "
        f"(pip install 'grpo-cli[{name}]', or leave it out of logging.report_to)"
    )
    assert caught.value.exit_code == 2


def test_wandb_takes_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    group = Trackers(["wandb"], _run(tmp_path), warn=_fail)
    group.log(1, {"reward": -1.5})
    group.close()
    assert list(tmp_path.glob("wandb/offline-run-*-0a1b/run-0a1b.wandb"))


def test_trackio_takes_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    pytest.importorskip("trackio")
    group = Trackers(["trackio"], _run(tmp_path), warn=_fail)
    group.log(1, {"reward": -1.5})
    group.close()
    assert (tmp_path / "p.db").exists()


class _Flaky:
    """A tracker whose service is down at even steps and at the end."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, dict[str, float]]] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step % 2 == 0:
            raise ConnectionError("service unavailable")
        self.taken.append((step, dict(metrics)))

    def close(self) -> None:
        raise TimeoutError("still uploading")


def test_a_tracker_that_fails_is_a_warning_and_gets_the_next_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flaky = _Flaky()

    def refuse(run: TrackedRun) -> _Flaky:
        raise PermissionError(f"no login for {run.project}")

    monkeypatch.setattr(trackers, "_TRACKERS", {"wandb": lambda _: flaky, "trackio": refuse})
    warnings: list[tuple[str, str]] = []
    group = Trackers(["trackio", "wandb"], _run(tmp_path), warn=lambda *warning: warnings.append(warning))
    for step in (1, 2, 3):
        group.log(step, {"reward": 0.0, "kl": math.nan})
    group.close()
    assert flaky.taken == [(1, {"reward": 0.0}), (3, {"reward": 0.0})]
    assert warnings == [
        ("tracker/trackio", "trackio did not start; the run goes on without it: PermissionError: no login for p"),
        ("tracker/wandb", "wandb did not take a step: ConnectionError: service unavailable"),
        ("tracker/wandb", "wandb did not close; some of it may be missing: TimeoutError: still uploading"),
    ]


def test_a_request_to_stop_is_no_failure_of_a_tracker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Interrupting(_Flaky):
        def close(self) -> None:
            raise Interrupted(signal.SIGTERM)

    monkeypatch.setattr(trackers, "_TRACKERS", {"wandb": lambda _: Interrupting()})
    group = Trackers(["wandb"], _run(tmp_path), warn=_fail)
    with pytest.raises(Interrupted):
        group.close()
