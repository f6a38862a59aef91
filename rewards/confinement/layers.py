"""The layers that can hide files from a process, and what each needs of the command that starts it."""

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from pathlib import Path


class Layer(StrEnum):
    """What hides files. Limits, fewer rights and a filter of system calls come with each but `LIMITS`."""

    BUBBLEWRAP = "bubblewrap"
    """The program `bwrap`: a file system, a network and a table of processes of its own."""
    NAMESPACES = "namespaces"
    """The same by the kernel's namespaces, without the program, and without a table of processes."""
    LANDLOCK = "landlock"
    """Landlock: files stay where they are and cannot be opened. Needs no rights."""
    LIMITS = "limits"
    """Nothing but limits on memory, time, threads and the size of files."""


_SYSTEM = (
    *(
        "/bin",
        "/lib",
        "/lib64",
        "/usr/bin",
        "/usr/lib",
        "/usr/lib64",
        "/usr/share",
        "/usr/local/lib",
        "/usr/local/lib64",
    ),
    *("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"),
)
_INSTALLED = ("bin", "lib", "lib64", "share", "pyvenv.cfg")
"""Parts of where an interpreter is installed: other parts may be anybody's, as in `/usr/src/app`."""


def readable_paths() -> list[str]:
    """List what a program may read: the interpreter with what is installed in it, and the system's programs and libraries.

    None lies below another. Where a path leads through links, the place that it leads to is listed too.
    """
    prefixes = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}
    installed = [str(Path(prefix, part)) for prefix in prefixes for part in _INSTALLED]
    installed += [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    interpreters = [str(Path(path).parent) for path in (sys.executable, os.path.realpath(sys.executable))]
    paths = [*_SYSTEM, *installed, *interpreters, *library_folders()]
    places = {place for path in paths if os.path.lexists(path) for place in (path, os.path.realpath(path))}
    return sorted(place for place in places if not any(str(parent) in places for parent in Path(place).parents))


def library_folders() -> list[str]:
    """List the folders of `LD_LIBRARY_PATH` that hold shared libraries; never a user's folder, or one around it."""
    found = []
    for text in filter(os.path.isabs, os.environ.get("LD_LIBRARY_PATH", "").split(":")):
        folder = Path(text).resolve()
        if not any(user.resolve().is_relative_to(folder) for user in (Path.cwd(), Path.home())):
            with contextlib.suppress(OSError):
                found += [text] * any(".so" in each.name for each in folder.iterdir())
    return found


def environment(folder: str) -> dict[str, str]:
    """Make the environment of a program, which has nothing of this process's but where shared libraries are."""
    variables = {
        "HOME": folder,
        "TMPDIR": folder,
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",  # the order of a set is the same in every run
        # More threads would reserve more memory than there is.
        **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    }
    libraries = library_folders()
    return {**variables, "LD_LIBRARY_PATH": ":".join(libraries)} if libraries else variables


def _room(program: str, folder: str, max_bytes: int) -> list[str]:
    """Give bwrap's words for a folder in memory, which cannot grow; the folder itself where this version knows no sizes."""
    if "--size" not in _help(program):
        return ["--bind", folder, folder]
    return ["--perms", "1777", "--size", str(max_bytes), "--tmpfs", folder]


@lru_cache(maxsize=1)
def _help(program: str) -> str:
    return subprocess.run([program, "--help"], check=False, capture_output=True, text=True).stdout  # noqa: S603


def command_prefix(layer: Layer, folder: str, readable: Sequence[str], *, max_disk_bytes: int) -> list[str]:
    """Give what stands before the interpreter on the command line.

    Raises:
        FileNotFoundError: If the layer needs a program that is not there.
    """
    if layer is not Layer.BUBBLEWRAP:
        return []
    program = shutil.which("bwrap")
    if program is None:
        raise FileNotFoundError("bwrap is not installed")
    package = str(Path(__file__).resolve().parents[1])  # the process imports it before it hides the rest
    # Folders above are made first and open: bwrap would make them as closed as what it puts into them.
    above = sorted({str(parent) for path in (*readable, package, folder) for parent in Path(path).parents} - {"/"})
    kept = [word for parent in above for word in ("--dir", parent)]
    for path in (*readable, package):
        link = Path(path).is_symlink()
        kept += ["--symlink", str(Path(path).readlink()), path] if link else ["--ro-bind", path, path]
    # An administrator keeps the right to become another user; `privileges` does so and gives it up.
    rights = ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if os.getuid() == 0 else ["--unshare-user"]
    return [
        *(program, "--unshare-net", "--unshare-pid", "--unshare-ipc", "--unshare-uts"),
        *("--die-with-parent", "--new-session", "--cap-drop", "ALL", *rights),
        *(
            *kept,
            "--dev",
            "/dev",
            "--proc",
            "/proc",
            *_room(program, folder, max_disk_bytes),
            "--remount-ro",
            "/dev",
            "--remount-ro",
            "/",
            "--chdir",
            "/",
            "--",
        ),
    ]
