"""The checkpoints folder of a run: complete checkpoints under their step's name, and nothing else that counts."""

import errno
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from grpo_cli.engine.manifest import damage, flush_folder, write_manifest
from grpo_cli.errors import CheckpointError

BEST = "best.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class BestCheckpoint:
    """Which step an evaluation metric was best at."""

    step: int
    metric: str
    value: float


class CheckpointStore:
    """Writes, finds and prunes checkpoints.

    Args:
        folder: `output_dir/checkpoints`.
        keep: Newest checkpoints to keep, besides the best one.
    """

    def __init__(self, folder: Path, *, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def path(self, step: int) -> Path:
        """Name the checkpoint of a step."""
        return self.folder / f"step-{step:06d}"

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Write a checkpoint beside, make it durable, then give it its name.

        Args:
            step: Optimizer steps done.
            write: Fills an empty folder.

        Raises:
            CheckpointError: If the disk is full or not writable; what was there before is untouched.
        """
        target = self.path(step)
        if target.exists():
            if damage(target) is None:
                return target
            shutil.rmtree(target)
        beside = self.folder / f".writing-{target.name}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir()
            write(beside)
            write_manifest(beside)
            beside.rename(target)
            flush_folder(self.folder)
        except OSError as error:
            shutil.rmtree(beside, ignore_errors=True)
            raise _save_error(error, target, newest=self.steps()) from error
        self._prune()
        return target

    def steps(self) -> list[int]:
        """List the steps that have a checkpoint, complete or not, in order."""
        return sorted(int(path.name.removeprefix("step-")) for path in self.folder.glob("step-[0-9]*"))

    def newest_complete(self) -> Iterator[tuple[Path, str | None]]:
        """Walk from the newest checkpoint to the oldest: the path and what is wrong with it, if anything."""
        for step in reversed(self.steps()):
            yield self.path(step), damage(self.path(step))

    @property
    def best(self) -> BestCheckpoint | None:
        """The checkpoint that the evaluation metric was best at."""
        try:
            return BestCheckpoint(**json.loads((self.folder / BEST).read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None

    def mark_best(self, best: BestCheckpoint | None) -> None:
        """Remember the best checkpoint, or (None, after a resume from before it) forget it."""
        path = self.folder / BEST
        if best is None:
            path.unlink(missing_ok=True)
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".writing")
        beside.write_text(json.dumps({"step": best.step, "metric": best.metric, "value": best.value}), encoding="utf-8")
        beside.rename(path)

    def remove_after(self, step: int) -> None:
        """Remove checkpoints of later steps: a run that was resumed before them writes its own."""
        for later in self.steps():
            if later > step:
                shutil.rmtree(self.path(later))

    def _prune(self) -> None:
        """Remove all but the newest `keep` and the best."""
        best = self.best
        protected = {best.step} if best else set()
        for step in self.steps()[: -self.keep]:
            if step not in protected:
                shutil.rmtree(self.path(step))


def _save_error(error: OSError, target: Path, *, newest: list[int]) -> CheckpointError:
    """Say why a checkpoint could not be written, and what there is."""
    before = f"the newest checkpoint is that of step {newest[-1]}" if newest else "there is no checkpoint yet"
    if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        free = shutil.disk_usage(target.parent).free / 2**30
        return CheckpointError(
            f"no space left for {target} ({free:.1f} GiB free); {before}",
            hint="free some space or lower train.keep_checkpoints, then continue with --resume",
        )
    return CheckpointError(
        f"cannot write {target}: {error}; {before}", hint="continue with --resume when it is writable"
    )
