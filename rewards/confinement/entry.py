"""What a confined process does first: it reads its orders, confines itself, says so, and does its work.

    python -s -P -B entry.py ORDERS READY

ORDERS is an open file with JSON, READY a pipe into which an exclamation mark is written when nothing is open any more, or else
what failed; then nothing is run. The work is the function `main` of a module of
this package's that the orders name, imported before files are hidden.
"""

import importlib
import json
import os
import resource
import sys
from collections.abc import Callable
from typing import Any

DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


def main() -> None:
    """Confine this process and do the work."""
    ready = int(sys.argv[2])
    try:
        with os.fdopen(int(sys.argv[1]), "rb") as file:
            orders = json.load(file)
        work = _import_work(orders["work"])
        if sys.platform == "linux":
            _confine(orders)
        else:
            _limit(orders)
        os.chdir(orders["folder"])
    except Exception as error:
        os.write(ready, f"{type(error).__name__}: {error}"[:1000].encode())
        raise
    os.write(ready, b"!")
    os.close(ready)
    sys.argv[1:] = []
    work(orders["task"])


def _import_work(module: str) -> Callable[[Any], None]:
    """Import while there are files to import from; the path of the package is not left behind."""
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    work: Callable[[Any], None] = importlib.import_module(module).main
    if sys.platform == "linux":
        for name in ("landlock", "namespaces", "privileges", "system_calls"):
            importlib.import_module(f"rewards.confinement.{name}")
    del sys.path[0]
    return work


def _confine(orders: dict[str, Any]) -> None:
    """Files first, since hiding them takes rights; then rights, limits, and last the system calls that all this took."""
    from rewards.confinement import landlock, namespaces, privileges, system_calls  # noqa: PLC0415  imported before

    match orders["layer"]:
        case "landlock":
            landlock.hide_files(orders["readable"], [orders["folder"], *DEVICES])
        case "namespaces":
            namespaces.hide_files(
                orders["readable"], orders["folder"], DEVICES, user=orders["user"], max_bytes=orders["max_disk_bytes"]
            )
    privileges.give_up(orders["user"], keep_reading=orders["layer"] == "landlock")
    _limit(orders)
    if orders["layer"] != "limits":
        system_calls.deny()


def _limit(orders: dict[str, Any]) -> None:
    """Set limits that cannot be raised again, except where the machine's own are lower."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    for name, value in orders["limits"].items():
        kind = getattr(resource, name)
        wanted = int(used.ru_utime + used.ru_stime) + 1 + value if name == "RLIMIT_CPU" else value
        hard = resource.getrlimit(kind)[1]
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        try:
            resource.setrlimit(kind, (limit, limit))
        except (OSError, ValueError):
            if sys.platform == "linux":  # others know some limits by name only; the examination finds out
                raise


if __name__ == "__main__":
    main()
