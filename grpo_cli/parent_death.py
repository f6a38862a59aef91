"""What becomes of a process whose parent dies: the kernel tells it, where it can (Linux, prctl(2))."""

import ctypes
import sys

_PR_SET_PDEATHSIG = 1


def signal_at_parents_death(number: int) -> None:
    """Have this process get a signal when the thread that started it ends.

    Args:
        number: Which; a process that is forked does not inherit it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
