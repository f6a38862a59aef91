"""The checkpoints folder of a run: complete checkpoints under their step's name, and nothing else that counts."""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError

from grpo_cli.engine.manifest import damage, flush_folder, write_manifest
from grpo_cli.errors import CheckpointError

BEST = "best.json"
_UNFINISHED = ".writing-"
_CHECKPOINT = re.compile(r"step-(\d{6,})")


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
        beside = self.folder / f"{_UNFINISHED}{target.name}"
        with self._explained(target):
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir()
            try:
                write(beside)
                write_manifest(beside)
                beside.rename(target)
            finally:
                shutil.rmtree(beside, ignore_errors=True)
            flush_folder(self.folder)
            self._prune()
        return target

    def steps(self) -> list[int]:
        """List the steps that have a checkpoint, complete or not, in order."""
        names = (_CHECKPOINT.fullmatch(path.name) for path in self.folder.glob("step-*"))
        return sorted(int(name[1]) for name in names if name is not None)

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
        with self._explained(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            beside = self.folder / f"{_UNFINISHED}{BEST}"
            with beside.open("w", encoding="utf-8") as file:
                json.dump(asdict(best), file)
                file.flush()
                os.fsync(file.fileno())
            beside.rename(path)
            flush_folder(self.folder)

    def start_from(self, step: int, *, best: BestCheckpoint | None) -> None:
        """Forget what a run that begins at a step has not done: later checkpoints, a later best, unfinished writes."""
        with self._explained(self.folder):
            for leftover in self.folder.glob(f"{_UNFINISHED}*"):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
            for later in self.steps():
                if later > step:
                    shutil.rmtree(self.path(later))
        self.mark_best(best if best is not None and self.path(best.step).is_dir() else None)

    def _prune(self) -> None:
        """Remove all but the newest `keep` and the best."""
        best = self.best
        protected = {best.step} if best else set()
        for step in self.steps()[: -self.keep]:
            if step not in protected:
                shutil.rmtree(self.path(step))

    @contextmanager
    def _explained(self, target: Path) -> Iterator[None]:
        """Say why something could not be written, and what there is."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise _save_error(error, target, newest=self.steps()) from error


def _save_error(error: OSError | SafetensorError, target: Path, *, newest: list[int]) -> CheckpointError:
    """Word the error of a failed write."""
    before = f"the newest checkpoint is that of step {newest[-1]}" if newest else "there is no checkpoint yet"
    # safetensors has no errno, only the system's words for it.
    full = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
    if getattr(error, "errno", None) in full or any(f"os error {number}" in str(error) for number in full):
        free = shutil.disk_usage(target.parent).free / 2**30
        return CheckpointError(
            f"no space left for {target} ({free:.1f} GiB free); {before}",
            hint="free some space or lower train.keep_checkpoints, then continue with --resume",
        )
    return CheckpointError(
        f"cannot write {target}: {error}; {before}", hint="continue with --resume when it is writable"
    )
