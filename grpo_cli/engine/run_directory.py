"""The run directory: may a run start there, and where does a resumed one begin?"""

import shutil
from collections.abc import Callable
from pathlib import Path

from grpo_cli.engine.checkpoint_store import CheckpointStore
from grpo_cli.engine.manifest import damage
from grpo_cli.errors import CheckpointError

NEWEST = "newest"
"""The value of `--resume` without a path."""

_OWNED = ("recipe.yaml", "metrics.jsonl", "completions", "eval", "checkpoints", "final", "tensorboard")


def start_fresh(output_dir: Path, *, overwrite: bool) -> None:
    """Make the run directory for a run from the beginning.

    Raises:
        CheckpointError: If a run is there already and may not be overwritten.
    """
    present = [name for name in _OWNED if (output_dir / name).exists()]
    if present and not overwrite:
        raise CheckpointError(
            f"train.output_dir: {output_dir} already holds a run ({', '.join(present)})",
            hint="--resume continues it; train.overwrite_output_dir=true starts over; or choose another train.output_dir",
        )
    for name in present:
        path = output_dir / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"train.output_dir: cannot create {output_dir}: {error}") from error


def checkpoint_to_resume(resume: str, store: CheckpointStore, say: Callable[[str], None]) -> Path | None:
    """Find the checkpoint that `--resume` means.

    Args:
        resume: `NEWEST`, or the path of a checkpoint, or of a run directory whose newest checkpoint is meant.
        store: The run's own checkpoints.
        say: Told about checkpoints that are passed over.

    Returns:
        A complete checkpoint; None if the run has none yet and begins at the beginning (so that a job which always passes
        `--resume` can be requeued at any time).

    Raises:
        CheckpointError: If a path was named and there is no complete checkpoint.
    """
    if resume == NEWEST:
        return _newest(store, say)
    path = Path(resume).expanduser().absolute()
    if (path / "checkpoints").is_dir():
        found = _newest(CheckpointStore(path / "checkpoints", keep=store.keep), say)
        if found is None:
            raise CheckpointError(f"--resume {resume}: no complete checkpoint in {path / 'checkpoints'}")
        return found
    if not path.is_dir():
        raise CheckpointError(f"--resume {resume}: there is no such folder", hint=_what_there_is(store))
    problem = damage(path)
    if problem is not None:
        raise CheckpointError(f"--resume {resume}: the checkpoint is damaged: {problem}", hint=_what_there_is(store))
    return path


def _newest(store: CheckpointStore, say: Callable[[str], None]) -> Path | None:
    """Give the newest complete checkpoint, and tell about damaged ones."""
    for path, problem in store.newest_complete():
        if problem is None:
            return path
        say(f"passing over checkpoint {path.name}: {problem}")
    return None


def _what_there_is(store: CheckpointStore) -> str:
    """List the run's checkpoints."""
    steps = store.steps()
    if not steps:
        return f"there are no checkpoints in {store.folder}"
    return f"in {store.folder} there are " + ", ".join(store.path(step).name for step in steps)
