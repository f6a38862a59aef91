"""Feeds a process, reads what it says, and ends it at a deadline or when it says or writes too much."""

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from enum import StrEnum

_LOOK_SECONDS = 0.1
"""Between two looks at the folder."""
_CHUNK_BYTES = 1 << 16


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
    received: dict[int, bytearray] = {1: bytearray(), 2: bytearray()}
    waiting = memoryview(text)
    end: End | None = None
    with selectors.DefaultSelector() as selector:
        for stream, number in ((process.stdout, 1), (process.stderr, 2), (process.stdin, 0)):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ if number else selectors.EVENT_WRITE, number)
        while end is None and _is_open(selector):
            left = deadline - time.monotonic()
            for key, _ in selector.select(max(0.0, min(left, _LOOK_SECONDS))):
                if key.data == 0:
                    waiting = _feed(key.fd, waiting)
                    is_done = not waiting
                else:
                    chunk = _read(key.fd)
                    received[key.data] += chunk or b""
                    is_done = chunk == b""
                if is_done:
                    selector.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]  # registered above as a stream
            if sum(map(len, received.values())) > max_output_bytes:
                end = End.OUTPUT
            elif folder_bytes(folder) > max_disk_bytes:
                end = End.DISK
            elif left <= 0:
                end = End.TIME
    if end is None:
        end = _wait_for_end(process, deadline)
    kill(process)
    code = process.returncode
    if end is End.EXIT and (code < 0 or code > 128):  # bwrap tells of a signal as a shell does
        end, code = End.SIGNAL, -code if code < 0 else code - 128
    return Finished(end=end, code=code, output=bytes(received[1]), errors=bytes(received[2]))


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
    """Add up what the files of a folder take on disk; there are no folders in it."""
    total = 0
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                total += 512 * entry.stat(follow_symlinks=False).st_blocks
    return total


def remove_folder(folder: str) -> None:
    """Remove a folder; where a program that was not confined left one too deep to remove, it stays."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)


def _is_open(selector: selectors.BaseSelector) -> bool:
    """Tell whether something may still be said; a process that only does not read its input has not ended for that."""
    return any(key.data for key in selector.get_map().values())


def _feed(descriptor: int, waiting: memoryview) -> memoryview:
    try:
        return waiting[os.write(descriptor, waiting[:_CHUNK_BYTES]) :] if waiting else waiting
    except BlockingIOError:
        return waiting
    except BrokenPipeError:
        return waiting[:0]


def _read(descriptor: int) -> bytes | None:
    try:
        return os.read(descriptor, _CHUNK_BYTES)
    except BlockingIOError:
        return None


def _wait_for_end(process: subprocess.Popen[bytes], deadline: float) -> End:
    """Wait for a process that closed its outputs, and may go on without them."""
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return End.TIME
    return End.EXIT
