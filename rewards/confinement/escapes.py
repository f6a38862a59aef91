"""Tries to break out, and prints what succeeded as JSON: how a layer is examined. Runs in the confined process."""

import contextlib
import ctypes
import importlib
import json
import os
import resource
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

_MANY = 4096
"""Threads, if nothing limits them."""


def main(task: Mapping[str, Any]) -> None:
    """Try everything.

    Args:
        task: `port` and `abstract`, where somebody listens; `files` that must not be opened; `folders` in which none of
            this `name` may be made; `variables` that may be set; `parent`, a process; `max_memory_bytes`.
    """
    importlib.import_module("colorsys")  # what nothing imports by itself
    opened = [name for name, attempt in ATTEMPTS.items() if attempt(task)]
    with open("own", "w+", encoding="utf-8") as file:  # noqa: PTH123  what programs do
        file.write("works")
    os.remove("own")  # noqa: PTH107
    sys.stdout.write(json.dumps(opened))


def _succeeds(action: Callable[..., object], *arguments: object) -> bool:
    try:
        action(*arguments)
    except (OSError, RuntimeError, MemoryError, AttributeError):
        return False
    return True


def _network(task: Mapping[str, Any]) -> bool:
    def connect(family: int, address: Any) -> None:
        with socket.socket(family) as connection:
            connection.settimeout(5)
            connection.connect(address)

    return _succeeds(connect, socket.AF_INET, ("127.0.0.1", task["port"])) or (
        sys.platform == "linux" and _succeeds(connect, socket.AF_UNIX, task["abstract"])
    )


def _files(task: Mapping[str, Any]) -> bool:
    attempts = [(path, os.O_RDONLY) for path in task["files"]]
    attempts += [(path, os.O_WRONLY) for path in task["files"]]
    return any(_succeeds(_close_again, path, flags) for path, flags in attempts) or any(
        _succeeds(_make_and_remove, f"{folder}/{task['name']}") for folder in task["folders"]
    )


def _make_and_remove(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    os.remove(path)  # noqa: PTH107


def _close_again(path: str, flags: int) -> None:
    os.close(os.open(path, flags))


def _environment(task: Mapping[str, Any]) -> bool:
    own = f"/proc/{task['parent']}/environ"
    # In a table of processes of its own, the number may be this process's.
    return bool(set(os.environ) - set(task["variables"])) or (
        task["parent"] != os.getpid() and _succeeds(_close_again, own, os.O_RDONLY)
    )


def _signals(task: Mapping[str, Any]) -> bool:
    return task["parent"] != os.getpid() and _succeeds(os.kill, task["parent"], 0)


def _processes(_: Mapping[str, Any]) -> bool:
    """Start a process, and more threads than there may be; that limit may count others of the same user too."""
    with contextlib.suppress(OSError):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        return True
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    too_many = limit + 1 if 0 <= limit < _MANY else _MANY
    end = threading.Event()
    started = []
    with contextlib.suppress(RuntimeError):
        threading.stack_size(1 << 16)
        for _number in range(too_many):
            thread = threading.Thread(target=end.wait)
            thread.start()
            started.append(thread)
    end.set()
    for thread in started:
        thread.join()
    threading.stack_size(0)
    return len(started) == too_many


def _memory(task: Mapping[str, Any]) -> bool:
    return _succeeds(ctypes.create_string_buffer, task["max_memory_bytes"])


ATTEMPTS = {
    "network": _network,
    "files": _files,
    "environment": _environment,
    "signals": _signals,
    "processes": _processes,
    "memory": _memory,
}
"""By the name of what is open if one succeeds."""
