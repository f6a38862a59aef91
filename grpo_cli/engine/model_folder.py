"""Where the model is that a run left behind."""

from collections.abc import Iterator
from pathlib import Path

from grpo_cli.engine.checkpoint_store import CheckpointStore
from grpo_cli.errors import CheckpointError


def model_folder(source: Path, *, prefers_best: bool = False) -> Path:
    """Find the model of a run directory, a checkpoint, or in the folder itself.

    Args:
        source: One of them.
        prefers_best: Of a run without a final model, whether its best checkpoint comes before its newest.

    Raises:
        CheckpointError: If there is none.
    """
    for folder in _places(source, prefers_best=prefers_best):
        if (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file():
            return folder
    raise CheckpointError(
        f"{source} holds no model",
        hint="name a run's train.output_dir, a checkpoint in it, or a folder with config.json",
    )


def _places(source: Path, *, prefers_best: bool) -> Iterator[Path]:
    """Give the folders where it may be, in the order in which they count."""
    yield source / "final"
    store = CheckpointStore(source / "checkpoints", keep=1)
    best = store.best if prefers_best else None
    if best is not None:
        yield store.path(best.step) / "model"
    for step in reversed(store.steps()):
        yield store.path(step) / "model"
    yield source / "model"
    yield source
