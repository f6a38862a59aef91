"""The process above a worker: whatever a reward function starts, and however its process ends, nothing of it is left.

It forks before anything is imported, so it stays small. What loses its parent becomes its child, also what has made a session of its own.
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys
from pathlib import Path

from grpo_cli.parent_death import signal_at_parents_death

_PR_SET_CHILD_SUBREAPER = 36


def supervised(*descriptors: int) -> None:
    """Fork; return in the child. The parent waits for it, ends what it leaves behind, and ends as the child did.

    Args:
        descriptors: What only the child is to hold open.
    """
    if sys.platform != "linux":
        return
    signal_at_parents_death(signal.SIGKILL)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = os.fork()
    if child == 0:
        signal_at_parents_death(signal.SIGKILL)
        return
    for descriptor in descriptors:
        os.close(descriptor)
    status = _wait(child)
    _end_children()
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def _wait(child: int) -> int:
    """Wait for a child; others that have ended meanwhile are reaped."""
    while True:
        with contextlib.suppress(InterruptedError):
            ended, status = os.waitpid(-1, 0)
            if ended == child:
                return status


def _end_children() -> None:
    """Kill children until there are none: those of the killed become children."""
    own = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    while True:
        with contextlib.suppress(OSError):
            for pid in own.read_text().split():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(int(pid), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return
