"""Hides files by Landlock, which needs no rights (Linux 5.13 or newer, where it is switched on).

Landlock leaves names, sizes and modes of hidden files to be seen, and modes to be changed; `system_calls` denies the latter.

Source: landlock(7) and linux/landlock.h. Runs in the confined process.
"""

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_FILE, _MAKE_REG, _TRUNCATE = (1 << bit for bit in (1, 2, 3, 5, 8, 14))
_FILE_RIGHTS = _WRITE_FILE | _READ_FILE | _TRUNCATE
_NUM_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""How many rights each version knows; later ones 16."""
_NETWORK, _SCOPES = 0b11, 0b11
"""Binding and connecting TCP from version 4, other processes' abstract sockets and signals from version 6."""
_PR_SET_NO_NEW_PRIVS = 38


def hide_files(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Leave this process and its threads only these files and folders, with all below them; there is no way back.

    Args:
        readable: Paths to read; those that do not exist are left out.
        writable: Folders in which plain files can be made, read and removed, and files such as `/dev/null`.

    Raises:
        OSError: If the kernel has no Landlock.
    """
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    version = _checked(library.syscall(_CREATE, None, ctypes.c_size_t(0), _VERSION_FLAG))
    known = (1 << _NUM_RIGHTS.get(version, 16)) - 1
    # The kernel takes as much of the structure as its version knows.
    attributes = struct.pack("=QQQ", known, _NETWORK, _SCOPES)[: 8 if version < 4 else 16 if version < 6 else 24]
    rules = _checked(library.syscall(_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0))
    for paths, rights in (
        (readable, _READ_FILE | _READ_DIR),
        (writable, _FILE_RIGHTS | _READ_DIR | _REMOVE_FILE | _MAKE_REG),
    ):
        for path in paths:
            _allow(library, rules, path, rights & known)
    if library.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot give up gaining rights")
    _checked(library.syscall(_RESTRICT, rules, 0))
    os.close(rules)


def _allow(library: ctypes.CDLL, rules: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # what cannot be opened needs no hiding
    if not stat.S_ISDIR(os.fstat(place).st_mode):
        rights &= _FILE_RIGHTS
    _checked(library.syscall(_ADD, rules, _PATH_BENEATH, struct.pack("=Qi", rights, place), 0))
    os.close(place)


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"Landlock: {os.strerror(ctypes.get_errno())}")
    return result
