"""The run directory: may a run start there, and where does a resumed one begin?"""

import fcntl
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_cli.engine.checkpoint_store import CheckpointStore
from grpo_cli.engine.manifest import damage
from grpo_cli.errors import CheckpointError

NEWEST = "newest"
"""The value of `--resume` without a path."""

_TRAINED = ("metrics.jsonl", "checkpoints", "final")
_OWNED = ("recipe.yaml", "metrics.jsonl", "completions", "eval", "checkpoints", "final", "tensorboard")


def refuse_to_overwrite(output_dir: Path) -> None:
    """Check that no run is there already; one that failed before its first step is none.

    Raises:
        CheckpointError: If one is.
    """
    present = [name for name in _TRAINED if (output_dir / name).exists()]
    if present:
        raise CheckpointError(
            f"train.output_dir: {output_dir} already holds a run ({', '.join(present)})",
            hint="--resume continues it; train.overwrite_output_dir=true starts over; or choose another train.output_dir",
        )


def remove_run(output_dir: Path) -> None:
    """Remove everything that a run wrote, and nothing else."""
    for name in _OWNED:
        path = output_dir / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def locked(output_dir: Path, *, key: str = "train.output_dir") -> Iterator[None]:
    """Make the run directory and keep other runs out of it.

    Args:
        output_dir: The run directory.
        key: What says where it is.

    Raises:
        CheckpointError: If it cannot be made, or another process is at work in it.
    """
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        lock = (output_dir / ".lock").open("w")
    except OSError as error:
        raise CheckpointError(f"{key}: cannot write to {output_dir}: {error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise CheckpointError(
                f"{key}: another run is at work in {output_dir}",
                hint=f"wait for it, stop it, or choose another {key}",
            ) from error
        yield


def checkpoint_to_resume(resume: str, store: CheckpointStore, say: Callable[[str], None]) -> Path | None:
    """Find the checkpoint that `--resume` means.

    Args:
        resume: `NEWEST`, or the path of a checkpoint, or of a run directory whose newest checkpoint is meant.
        store: The run's own checkpoints.
        say: Told about checkpoints that are passed over.

    Returns:
        A complete checkpoint; None if the run has none at all yet and begins at the beginning (so that a job which always
        passes `--resume` can be requeued at any time).

    Raises:
        CheckpointError: If a path was named and there is no complete checkpoint, or all that there are are damaged.
    """
    if resume == NEWEST:
        return _newest(store, say)
    path = Path(resume).expanduser().resolve()
    if (path / "checkpoints").is_dir():
        found = _newest(CheckpointStore(path / "checkpoints", keep=store.keep), say)
        if found is None:
            raise CheckpointError(f"--resume {resume}: no checkpoint in {path / 'checkpoints'}")
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
    if store.steps():
        raise CheckpointError(
            f"--resume: every checkpoint in {store.folder} is damaged",
            hint="restore one from a backup, or start over with train.overwrite_output_dir=true",
        )
    return None


def _what_there_is(store: CheckpointStore) -> str:
    """List the run's checkpoints."""
    steps = store.steps()
    if not steps:
        return f"there are no checkpoints in {store.folder}"
    return f"in {store.folder} there are " + ", ".join(store.path(step).name for step in steps)
