"""The system calls that a confined process may not make: a seccomp filter, for x86-64 and 64-bit ARM on Linux.

The filter denies what a program that reads, computes and prints does not need: sockets, new processes and programs, signals to
others, looking into others, changing owners and modes, mounts and everything for administrators. It says EPERM, which Python
turns into PermissionError. Calls that came after Linux 5.1, io_uring among them, do not exist but for a few harmless ones, so
that a new kernel opens nothing.

Source: seccomp(2) and linux/filter.h; numbers from asm/unistd_64.h and asm-generic/unistd.h. Runs in the confined process.
"""

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterable, Sequence

DENIED = {  # name: (number on x86-64, number on ARM), None where there is none
    # Network. A pair of connected sockets is allowed below.
    "socket": (41, 198),
    "connect": (42, 203),
    "accept": (43, 202),
    "accept4": (288, 242),
    "bind": (49, 200),
    "listen": (50, 201),
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
    # Processes and programs. Threads are allowed below.
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    # Signals to others, and looking into them.
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "perf_event_open": (298, 241),
    # Priorities and places of others, or of oneself.
    "setpriority": (141, 140),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # What outlives a process, or is shared with others of the same user.
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "semctl": (66, 191),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "memfd_create": (319, 279),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # Modes, owners, times and sizes of files by name, which Landlock does not control, and all that is no plain file.
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "utime": (132, None),
    "utimes": (235, None),
    "utimensat": (280, 88),
    "futimesat": (261, None),
    "truncate": (76, 45),
    "fallocate": (285, 47),  # takes room that the limit on a file's size does not count
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "link": (86, None),
    "linkat": (265, 37),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # Users and rights.
    "setuid": (105, 146),
    "setgid": (106, 144),
    "setreuid": (113, 145),
    "setregid": (114, 143),
    "setresuid": (117, 147),
    "setresgid": (119, 149),
    "setgroups": (116, 159),
    "setfsuid": (122, 151),
    "setfsgid": (123, 152),
    "capset": (126, 91),
    # The system.
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "personality": (135, 92),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "lookup_dcookie": (212, 18),
    "nfsservctl": (180, 42),
}
CONDITIONAL = {
    "kill": (62, 129),
    "tgkill": (234, 131),
    "clone": (56, 220),
    "prlimit64": (302, 261),
    "socketpair": (53, 199),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "prctl": (157, 167),
    "open": (2, None),
    "openat": (257, 56),
}
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of the tables, and what the kernel calls the machine (linux/audit.h)."""
_NEWER = 424
"""From here on the numbers are the same on all machines."""
_NEWER_ALLOWED = (436, 439, 441, 449)  # close_range, faccessat2, epoll_pwait2, futex_waitv
_FOREIGN = 0x40000000
"""Calls of x86-64's 32-bit variant begin here."""

_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_DENY, _MISSING = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS

_CLONE_THREAD = 0x10000
_STREAM, _UNIX = 1, 1
_SET_OWNER_OR_SIGNAL = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX: signals by way of a file
_SET_SOCKET_OWNER_OR_TYPE = (0x8901, 0x8902, 0x5412)  # FIOSETOWN, SIOCSPGRP, TIOCSTI
_SET_DEATH_SIGNAL = (1,)
_NAMELESS = 0x400000  # O_TMPFILE: a file that no list of a folder shows

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER_MODE = 38, 22, 2


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def deny() -> None:
    """Deny them from now on, in this thread and all that it starts; there is no way back.

    Raises:
        OSError: If the kernel does not take the filter, or the machine is neither x86-64 nor 64-bit ARM.
    """
    if platform.system() != "Linux" or platform.machine() not in _MACHINES:
        raise OSError(errno.ENOSYS, f"there is no filter of system calls for {platform.system()} {platform.machine()}")
    code = _filter(*_MACHINES[platform.machine()], os.getpid())
    library = ctypes.CDLL(None, use_errno=True)
    program = _Program(len(code) // 8, code)
    if (
        library.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
        or library.prctl(_PR_SET_SECCOMP, _FILTER_MODE, ctypes.byref(program), 0, 0) != 0
    ):
        raise OSError(ctypes.get_errno(), "the kernel does not take a filter of system calls")


def _filter(column: int, machine: int, process: int) -> bytes:
    number = {name: numbers[column] for name, numbers in (DENIED | CONDITIONAL).items()}
    own = [(0, 0xFFFFFFFF, process)]
    parts = [
        [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, machine), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)],
        [(_AT_LEAST, 0, 1, _FOREIGN), (_RETURN, 0, 0, _DENY)],
        _newer(),
        *([(_EQUAL, 0, 1, call), (_RETURN, 0, 0, _DENY)] for name in DENIED if (call := number[name]) is not None),
        _allowed_if(number["kill"], own),
        _allowed_if(number["tgkill"], own),
        _allowed_if(number["prlimit64"], [(0, 0xFFFFFFFF, 0)]),
        _allowed_if(number["clone"], [(0, _CLONE_THREAD, _CLONE_THREAD)]),
        _allowed_if(number["socketpair"], [(0, 0xFFFFFFFF, _UNIX), (1, 0xF, _STREAM)]),
        _denied_if(number["fcntl"], 1, _SET_OWNER_OR_SIGNAL),
        _denied_if(number["ioctl"], 1, _SET_SOCKET_OWNER_OR_TYPE),
        _denied_if(number["prctl"], 0, _SET_DEATH_SIGNAL),
        _denied_if(number["open"], 1, (_NAMELESS,), mask=_NAMELESS),
        _denied_if(number["openat"], 2, (_NAMELESS,), mask=_NAMELESS),
        [(_RETURN, 0, 0, _ALLOW)],
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for part in parts for instruction in part)


_Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, constant (`struct sock_filter`). Jumps count the instructions that are left out."""


def _newer() -> list[_Instruction]:
    allowed = [line for call in _NEWER_ALLOWED for line in ((_EQUAL, 0, 1, call), (_RETURN, 0, 0, _ALLOW))]
    return [(_AT_LEAST, 0, len(allowed) + 1, _NEWER), *allowed, (_RETURN, 0, 0, _MISSING)]


def _allowed_if(call: int | None, conditions: Sequence[tuple[int, int, int]]) -> list[_Instruction]:
    """Allow a call only where all of its arguments, masked, have these values: (position, mask, value)."""
    assert call is not None
    checks = [
        line
        for position, mask, value in conditions
        for line in (_argument(position), (_AND, 0, 0, mask), (_EQUAL, 1, 0, value), (_RETURN, 0, 0, _DENY))
    ]
    return [(_EQUAL, 0, len(checks) + 1, call), *checks, (_RETURN, 0, 0, _ALLOW)]


def _denied_if(call: int | None, position: int, values: Iterable[int], *, mask: int = 0xFFFFFFFF) -> list[_Instruction]:
    """Deny a call where one argument, masked, has one of these values; nothing where there is no such call."""
    if call is None:
        return []
    checks = [line for value in values for line in ((_EQUAL, 0, 1, value), (_RETURN, 0, 0, _DENY))]
    return [
        *((_EQUAL, 0, len(checks) + 3, call), _argument(position), (_AND, 0, 0, mask)),
        *(*checks, (_RETURN, 0, 0, _ALLOW)),
    ]


def _argument(position: int) -> _Instruction:
    """Load the lower half of an argument: process numbers, flags and commands are no longer than that."""
    return (_LOAD, 0, 0, 16 + 8 * position)
