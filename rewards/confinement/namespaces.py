"""Hides files, the network and System V objects by namespaces of the kernel: a new root that holds nothing else.

Needs user namespaces, which some machines keep from users (Docker's default, for one), or the rights of an administrator.

Source: user_namespaces(7), mount_namespaces(7), pivot_root(2). Runs in the confined process.
"""

import ctypes
import os
import platform
from collections.abc import Iterable, Sequence

_NEW_MOUNTS, _NEW_NAMES, _NEW_IPC, _NEW_USERS, _NEW_NETWORK = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x40000000
_READ_ONLY, _NO_SETUID, _NO_DEVICES, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_DETACH = 2
_KEPT = {
    os.ST_RDONLY: _READ_ONLY,
    os.ST_NOSUID: _NO_SETUID,
    os.ST_NODEV: _NO_DEVICES,
    os.ST_NOEXEC: 8,
    os.ST_NOATIME: 1024,
    os.ST_NODIRATIME: 2048,
    os.ST_RELATIME: 1 << 21,
}
"""Flags of a mount that a user namespace must repeat when it mounts again."""
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}


class _Kernel:
    """The calls that Python has no functions for."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)

    def unshare(self, flags: int) -> None:
        self._check(self._library.unshare(flags), "unshare")

    def mount(self, source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
        texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
        outcome = self._library.mount(*texts[:3], ctypes.c_ulong(flags), texts[3])
        self._check(outcome, f"mount {target}")

    def pivot_root_here(self) -> None:
        """Make the working folder the root, and forget the old one."""
        self._check(self._library.syscall(_PIVOT_ROOT[platform.machine()], b".", b"."), "pivot_root")
        self._check(self._library.umount2(b".", _DETACH), "umount2")
        os.chdir("/")

    @staticmethod
    def _check(outcome: int, what: str) -> None:
        if outcome != 0:
            raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def hide_files(
    readable: Sequence[str], folder: str, devices: Iterable[str], *, user: int | None, max_bytes: int
) -> None:
    """Leave this process, which must have one thread, a root that holds only these files and folders, and no network.

    Args:
        readable: Paths that stay, read-only; a link stays one.
        folder: A folder that stays in name: writable and empty, in memory, so that it cannot grow.
        devices: Files that stay as they are.
        user: Whose the folder is; None for this one.
        max_bytes: What it can hold, and one file for each 4 KiB of that.

    Raises:
        OSError: If the kernel does not allow it.
    """
    kernel = _Kernel()
    _unshare(kernel)
    kernel.mount(None, "/", None, _RECURSIVE | _PRIVATE)
    root = folder  # what is mounted over it is seen by this process alone
    kernel.mount("tmpfs", root, "tmpfs", _NO_SETUID | _NO_DEVICES, "size=64k,nr_inodes=1k,mode=755")
    for path in readable:
        _keep(kernel, path, root)
    for path in devices:
        _bind(kernel, path, root + path)
    os.makedirs(root + folder, exist_ok=True)
    owner = "" if user is None else f",uid={user},gid={user}"
    room = f"size={max_bytes},nr_inodes={max(16, max_bytes // 4096)},mode=700{owner}"
    kernel.mount("tmpfs", root + folder, "tmpfs", _NO_SETUID | _NO_DEVICES, room)
    kernel.mount(None, root, None, _BIND | _REMOUNT | _READ_ONLY | _NO_SETUID | _NO_DEVICES)
    os.chdir(root)
    kernel.pivot_root_here()


def _unshare(kernel: _Kernel) -> None:
    """Enter new namespaces; without an administrator's rights by way of a user namespace in which this user keeps its number."""
    flags = _NEW_MOUNTS | _NEW_NETWORK | _NEW_IPC | _NEW_NAMES
    user, group = os.getuid(), os.getgid()
    if user == 0:
        kernel.unshare(flags)
        return
    kernel.unshare(flags | _NEW_USERS)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def _keep(kernel: _Kernel, path: str, root: str) -> None:
    if not os.path.lexists(path):
        return
    if os.path.islink(path):
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        os.symlink(os.readlink(path), root + path)
        return
    _bind(kernel, path, root + path)
    state = os.statvfs(root + path)
    kept = sum(flag for bit, flag in _KEPT.items() if state.f_flag & bit)
    kernel.mount(None, root + path, None, _BIND | _REMOUNT | _READ_ONLY | _NO_SETUID | kept & ~_READ_ONLY & ~_NO_SETUID)


def _bind(kernel: _Kernel, path: str, target: str) -> None:
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    kernel.mount(path, target, None, _BIND | _RECURSIVE)
