"""A process and everything below it."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator

import psutil

_SECONDS_TO_KILL = 5.0
"""What then still lives, such as a process of another user, is left."""


def taken_by_tree(pid: int) -> tuple[int, int]:
    """Give the bytes of resident memory that a process and all below it take, and how many they are."""
    taken, processes = 0, 0
    for process in _living(pid):
        with contextlib.suppress(psutil.Error):
            taken += process.memory_info().rss
            processes += 1
    return taken, processes


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, its session, and all below it, also what has made a session of its own."""
    deadline = time.monotonic() + _SECONDS_TO_KILL
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGSTOP)
        # What is below it stays there until it is gone, for it is the reaper of all: so it goes last.
        while (
            below := [one for one in _living(process.pid) if one.pid != process.pid]
        ) and time.monotonic() < deadline:
            for one in below:
                with contextlib.suppress(psutil.Error):
                    one.kill()
            psutil.wait_procs(below, timeout=0.05)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_SECONDS_TO_KILL)


def _living(pid: int) -> Iterator[psutil.Process]:
    """List a process and all below it but those that only wait to be reaped."""
    try:
        process = psutil.Process(pid)
        tree = [process, *process.children(recursive=True)]
    except psutil.Error:
        return
    for one in tree:
        with contextlib.suppress(psutil.Error):
            if one.status() != psutil.STATUS_ZOMBIE:
                yield one
