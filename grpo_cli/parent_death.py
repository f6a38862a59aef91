"""What becomes of a process whose parent dies: the kernel tells it, where it can (Linux, prctl(2))."""

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1


def signal_at_parents_death(number: int, *, parent: int | None = None) -> None:
    """Have this process get a signal when the thread that started it ends.

    Args:
        number: Which; a process that is forked does not inherit it.
        parent: Who it was when this process began: if that one has gone already, the signal comes at once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
        if parent is not None and os.getppid() != parent:
            os.kill(os.getpid(), number)
