"""Experiment trackers. They are extra: what they show is in the run directory too, and none of them can end a run."""

import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml

from grpo_cli.errors import Problem, RecipeError


class Tracker(Protocol):
    """Takes the numbers of a step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take numbers by name; they are finite."""
        ...

    def close(self) -> None:
        """Send what is left."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """What a tracker is told about the run.

    Attributes:
        output_dir: The run directory; trackers keep their files in it.
        project: The project that runs are grouped in.
        name: The run's name.
        id: Names this run and no other, across restarts.
        recipe: The resolved recipe.
        resumed_at: Steps that were done when this process took over; None if it began the run.
    """

    output_dir: Path
    project: str
    name: str
    id: str
    recipe: Mapping[str, Any]
    resumed_at: int | None


def require_trackers(names: Sequence[str]) -> None:
    """Check that the packages of trackers are installed, without importing them.

    Raises:
        RecipeError: If some are not.
    """
    problems = [
        Problem(
            where="recipe",
            key="logging.report_to",
            message=f"{name!r} needs a package that is not installed",
            hint=f"pip install 'grpo-cli[{name}]', or leave it out of logging.report_to",
        )
        for name in names
        if importlib.util.find_spec(name) is None
    ]
    if problems:
        raise RecipeError(problems)


class Trackers:
    """All trackers of a run. One that fails is a warning; one that cannot start is left out.

    Args:
        names: `tensorboard`, `wandb`, `trackio`.
        run: What they are told.
        warn: Takes a key and a message.
    """

    def __init__(self, names: Sequence[str], run: TrackedRun, *, warn: Callable[[str, str], None]) -> None:
        self._warn = warn
        self._open: dict[str, Tracker] = {}
        for name in names:
            with self._failures(name, "did not start; the run goes on without it"):
                self._open[name] = _TRACKERS[name](run)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Give the numbers of a step to each; those that are not finite are left out."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        for name, tracker in self._open.items():
            with self._failures(name, "did not take a step"):
                tracker.log(step, finite)

    def close(self) -> None:
        """Close each."""
        for name, tracker in self._open.items():
            with self._failures(name, "did not close; some of it may be missing"):
                tracker.close()

    @contextmanager
    def _failures(self, name: str, what: str) -> Iterator[None]:
        """Turn any failure of a tracker into a warning: it may be anything, and none may end a run."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  third-party code that the run does not depend on
            self._warn(f"tracker/{name}", f"{name} {what}: {type(error).__name__}: {error}")


class TensorBoardTracker:
    """Event files in `output_dir/tensorboard`. Events after the resumed step are purged when they are read."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  optional package

        purge = None if run.resumed_at is None else run.resumed_at + 1
        self._writer: Any = SummaryWriter(str(run.output_dir / "tensorboard"), purge_step=purge, flush_secs=10)
        if run.resumed_at is None:
            recipe = yaml.safe_dump(dict(run.recipe), sort_keys=False, allow_unicode=True)
            self._writer.add_text("recipe", "\n".join(f"    {line}" for line in recipe.splitlines()), 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one scalar per number."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class WandbTracker:
    """Weights & Biases. `step` is a metric of its own, since W&B's own step cannot go back when a run is resumed."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb  # noqa: PLC0415  optional package

        self._run: Any = wandb.init(
            project=run.project,
            name=run.name,
            id=run.id,
            resume="allow",
            dir=str(run.output_dir),
            config=dict(run.recipe),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the numbers of one step."""
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        """Upload what is left."""
        self._run.finish()


class TrackioTracker:
    """Trackio. It knows a run by its name, so the id is part of it. A step that a resumed run does again appears twice."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio  # noqa: PLC0415  optional package

        self._run: Any = trackio.init(
            project=run.project, name=f"{run.name}-{run.id}", resume="allow", config=dict(run.recipe)
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the numbers of one step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Write what is left."""
        self._run.finish()


_TRACKERS: Mapping[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
}
