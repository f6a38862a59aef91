"""The end of a process group, whatever its processes do against it."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import psutil

_KILL_ROUNDS = 5
_LEFT_SECONDS = 5.0
"""For what remains of the group, and the process that removes its shared memory, to end."""
_POLL_SECONDS = 0.25


def kill_group(group: int) -> None:
    """Kill all processes of a group but this one, and but Python's resource tracker: it removes their shared memory, then ends."""
    # A process may start another while it is looked for; one that waits for a driver never ends.
    for _ in range(_KILL_ROUNDS):
        targets = [process for process in _members(group) if not _is_tracker(process)]
        if not targets:
            return
        for process in targets:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(targets, timeout=1.0)


def wait_for_the_rest(group: int) -> None:
    """Give resource trackers the time to clean up, and no more."""
    deadline = time.monotonic() + _LEFT_SECONDS
    while any(_members(group)):
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
            return
        time.sleep(_POLL_SECONDS)


def _members(group: int) -> Iterator[psutil.Process]:
    """Give the living processes of a group, without this one."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
            inside = os.getpgid(process.pid) == group and process.pid != os.getpid()
            if inside and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def _is_tracker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "resource_tracker" in " ".join(process.cmdline())
    return False
