"""Gives up rights: another user's number where there is the right to take it, no capabilities, no way to gain any.

Source: credentials(7), capabilities(7), prctl(2). Runs in the confined process.
"""

import ctypes
import os
import struct

_PR_SET_DEATH_SIGNAL, _PR_SET_KEEP_CAPABILITIES, _PR_SET_NO_NEW_PRIVS, _PR_AMBIENT = 1, 8, 38, 47
_AMBIENT_CLEAR = 4
_KILL = 9
_VERSION = 0x20080522
_OVERRIDE, _READ_AND_SEARCH = 1 << 1, 1 << 2
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH; Docker's default has the former only."""


def give_up(user: int | None, *, keep_reading: bool) -> None:
    """Become a user that owns nothing, without capabilities; the process ends with the one that started it.

    Args:
        user: Its number, also for its one group; None stays who it is.
        keep_reading: Keep a capability to read all files if there is one. Only where something else hides files and keeps them
            from being changed: the interpreter of an administrator may lie where no other user can read it.

    Raises:
        OSError: If the kernel does not allow it.
    """
    library = ctypes.CDLL(None, use_errno=True)
    permitted = _permitted(library)
    if user is not None:
        library.prctl(_PR_SET_KEEP_CAPABILITIES, 1, 0, 0, 0)
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    kept = (_READ_AND_SEARCH & permitted or _OVERRIDE & permitted) if keep_reading else 0
    library.prctl(_PR_AMBIENT, _AMBIENT_CLEAR, 0, 0, 0)  # fails before Linux 4.3, which has none
    for operation, argument in ((_PR_SET_NO_NEW_PRIVS, 1), (_PR_SET_DEATH_SIGNAL, _KILL)):
        _check(library.prctl(operation, argument, 0, 0, 0))
    _check(library.capset(struct.pack("=Ii", _VERSION, 0), struct.pack("=6I", kept, kept, 0, 0, 0, 0)))


def _permitted(library: ctypes.CDLL) -> int:
    data = ctypes.create_string_buffer(24)
    _check(library.capget(struct.pack("=Ii", _VERSION, 0), data))
    return int(struct.unpack("=6I", data.raw)[1])


def _check(outcome: int) -> None:
    if outcome != 0:
        raise OSError(ctypes.get_errno(), f"cannot give up rights: {os.strerror(ctypes.get_errno())}")
