"""Feeds a process, reads what it says, and ends it at a deadline or when it says or writes too much."""

import contextlib
import os
import selectors
import shutil
import signal
import stat
import subprocess
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

_LOOK_SECONDS = 0.1
"""Between two looks at the folder."""
_CHUNK_BYTES = 1 << 16
_LEAST_BYTES = 4096
"""What a name and a place for a file take."""


class End(StrEnum):
    """How a process came to its end."""

    EXIT = "exit"
    """By itself, with an exit code."""
    SIGNAL = "signal"
    """By a signal that was not ours: a crash, or the limit on processor time."""
    TIME = "time"
    """The deadline passed."""
    OUTPUT = "output"
    """It said too much."""
    DISK = "disk"
    """Its folder grew too large."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A process that ended.

    Attributes:
        end: How.
        code: Its exit code, or the number of the signal.
        output: Its standard output.
        errors: Its standard error.
    """

    end: End
    code: int
    output: bytes
    errors: bytes


def collect(
    process: subprocess.Popen[bytes],
    text: bytes,
    *,
    seconds: float,
    folder: str,
    max_output_bytes: int,
    max_disk_bytes: int,
) -> Finished:
    """Give a process its input and wait for its end, which comes by the deadline at the latest.

    Nothing of it is left: the process and its group have ended and were waited for.

    Args:
        process: In a group of its own, with pipes at all three ends.
        text: Its input; what it does not read is thrown away.
        seconds: Until it is ended.
        folder: Where it can write.
        max_output_bytes: Of output and errors together.
        max_disk_bytes: Of all files in the folder together.
    """
    deadline = time.monotonic() + seconds
    talk, next_look = _Talk(process, text), 0.0
    end: End | None = None
    while end is None and talk.goes_on(min(deadline - time.monotonic(), _LOOK_SECONDS)):
        now = time.monotonic()
        if talk.num_bytes > max_output_bytes:
            end = End.OUTPUT
        elif now >= deadline:
            end = End.TIME
        elif now >= next_look:
            next_look = now + _LOOK_SECONDS
            end = End.DISK if folder_bytes(folder) + removed_bytes(process.pid) > max_disk_bytes else None
    talk.close()
    if end is None:
        end = _wait_for_end(process, deadline)
    kill(process)
    code = process.returncode
    if end is End.EXIT and (code < 0 or code > 128):  # bwrap tells of a signal as a shell does
        end, code = End.SIGNAL, -code if code < 0 else code - 128
    return Finished(end=end, code=code, output=bytes(talk.received[1]), errors=bytes(talk.received[2]))


class _Talk:
    """What goes into a process and comes out of it, without waiting for either.

    Args:
        process: With pipes at all three ends.
        text: Its input.
    """

    def __init__(self, process: subprocess.Popen[bytes], text: bytes) -> None:
        self.received = {1: bytearray(), 2: bytearray()}
        """Output and errors."""
        self._waiting = memoryview(text)
        self._selector = selectors.DefaultSelector()
        for number, stream in enumerate((process.stdin, process.stdout, process.stderr)):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ if number else selectors.EVENT_WRITE, number)

    @property
    def num_bytes(self) -> int:
        """How much came out."""
        return sum(map(len, self.received.values()))

    def goes_on(self, seconds: float) -> bool:
        """Move what can be moved.

        Returns:
            Whether more may come; a process that only does not read its input has not ended for that.
        """
        for key, _ in self._selector.select(max(0.0, seconds)):
            if not (self._feed(key.fd) if key.data == 0 else self._read(key.fd, self.received[key.data])):
                self._selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]  # registered above as a stream
        return any(key.data for key in self._selector.get_map().values())

    def close(self) -> None:
        """Watch no more."""
        self._selector.close()

    def _feed(self, descriptor: int) -> bool:
        """Give some input; false if there is no more, or nobody reads it."""
        try:
            self._waiting = self._waiting[os.write(descriptor, self._waiting[:_CHUNK_BYTES]) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:
            return False
        return bool(self._waiting)

    @staticmethod
    def _read(descriptor: int, received: bytearray) -> bool:
        """Take some output; false at its end."""
        try:
            chunk = os.read(descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return True
        received += chunk
        return bool(chunk)


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a process with its group, wait for it and close its pipes."""
    if process.returncode is None:  # not waited for: its number cannot be another's
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


def folder_bytes(folder: str) -> int:
    """Add up what the files of a folder take on disk, an empty one too; there are no folders in it."""
    total = 0
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                total += max(_LEAST_BYTES, 512 * entry.stat(follow_symlinks=False).st_blocks)
    return total


def removed_bytes(process: int) -> int:
    """Add up what files take that a process has removed and holds open, as far as this one may look."""
    total = 0
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(OSError):
                state = file.stat()
                total += 512 * state.st_blocks * (state.st_nlink == 0 and stat.S_ISREG(state.st_mode))
    return total


def remove_folder(folder: str) -> None:
    """Remove a folder; where a program that was not confined left one too deep to remove, it stays."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for_end(process: subprocess.Popen[bytes], deadline: float) -> End:
    """Wait for a process that closed its outputs, and may go on without them."""
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return End.TIME
    return End.EXIT
