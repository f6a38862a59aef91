"""Files of the run directory: they are whole at any instant, whatever ends the process."""

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from grpo_cli.errors import DiskError

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Disk full, quota reached, file size limit reached."""


class JsonLines:
    """An append-only file of JSON objects, one a line. A line that was written is on the disk.

    Args:
        path: The file; it is created at the first append, its folder with it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one object and wait for the disk. A failed write leaves the file as it was.

        Raises:
            DiskError: If there is no room, or the file cannot be written.
        """
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        with disk_errors(self.path):
            descriptor = self._open()
            size = os.fstat(descriptor).st_size
            try:
                _write_all(descriptor, line)
                os.fsync(descriptor)
            except OSError:
                with suppress(OSError):  # the first failure is the one to tell about
                    os.ftruncate(descriptor, size)
                raise

    def records(self) -> list[dict[str, Any]]:
        """Read all whole lines; a torn one is left out.

        Raises:
            DiskError: If the file cannot be read.
        """
        parsed = (_parse(line) for line in self._lines())
        return [record for record in parsed if record is not None]

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Rewrite the file with only the objects that are wanted; torn lines go too. All or nothing.

        Raises:
            DiskError: If there is no room, or the file cannot be read or written.
        """
        self.close()
        lines = self._lines()
        kept = [line for line in lines if (record := _parse(line)) is not None and wanted(record)]
        if lines:
            write_whole(self.path, b"".join(line + b"\n" for line in kept))

    def close(self) -> None:
        """Close the file; the next append opens it again.

        Raises:
            DiskError: If the system says only now that a write failed.
        """
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with disk_errors(self.path):
                os.close(descriptor)

    def _lines(self) -> list[bytes]:
        with disk_errors(self.path, doing="read"):
            try:
                return self.path.read_bytes().splitlines()
            except FileNotFoundError:
                return []

    def _open(self) -> int:
        if self._descriptor is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            _flush_folder(self.path.parent)
        return self._descriptor


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is there completely or not at all: beside, flushed, renamed.

    Raises:
        DiskError: If there is no room, or the file cannot be written.
    """
    beside = path.with_name(f".writing-{path.name}")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                _write_all(descriptor, content)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            beside.replace(path)
        except OSError:
            with suppress(OSError):  # as above
                beside.unlink(missing_ok=True)
            raise
        _flush_folder(path.parent)


@contextmanager
def disk_errors(path: Path, *, doing: str = "write") -> Iterator[None]:
    """Turn an OSError into one that says what to do.

    Args:
        path: The file.
        doing: `write`, `read`.

    Raises:
        DiskError: Instead of an OSError.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)  # a library's own OSError has nothing but its text
        if error.errno in _NO_ROOM:
            raise DiskError(
                f"no room to {doing} {path}: {reason}",
                hint="free some space and continue with --resume; the checkpoints and records written so far are whole",
            ) from error
        raise DiskError(
            f"cannot {doing} {path}: {reason}",
            hint="make the folder writable, or set train.output_dir to another one",
        ) from error


def _write_all(descriptor: int, content: bytes) -> None:
    """Write everything: a single write may stop short where room runs out, and only the next one says why."""
    remaining = memoryview(content)
    while remaining:
        remaining = remaining[os.write(descriptor, remaining) :]


def _flush_folder(folder: Path) -> None:
    """Wait until the folder's entries are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _parse(line: bytes) -> dict[str, Any] | None:
    """Read a line, unless it is torn."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
