"""Finds the strongest layer that works here, by trying to break out of each."""

import contextlib
import json
import os
import secrets
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from rewards.confinement.layers import Layer, environment, readable_paths
from rewards.confinement.limits import Limits
from rewards.confinement.process import End
from rewards.confinement.sandbox import ConfinementError, Sandbox

_SECONDS = 20.0
_lock = threading.Lock()


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A sandbox, and what an examination of it showed.

    Attributes:
        sandbox: The one to use.
        open: What a program in it can reach all the same, such as `network`; nothing, if it confines.
        refused: Why each stronger layer was not taken, in its words.
    """

    sandbox: Sandbox
    open: tuple[str, ...]
    refused: tuple[str, ...]

    def describe(self) -> str:
        """Say in one line what is in force."""
        if self.open:
            others = f" ({'; '.join(self.refused)})" if self.refused else ""
            return f"UNCONFINED, {' and '.join(self.open)} open to it{others}"
        return (
            f"confined by {self.sandbox.layer}, a filter of system calls and resource limits; tried and closed: network, "
            f"files, environment, signals, processes, memory"
        )


def choose(limits: Limits) -> Choice:
    """Examine the layers from the strongest on, and give the first that holds; else the one with the least open.

    The examination takes about a tenth of a second and is made once for the same limits.

    Raises:
        ConfinementError: If not even an unconfined process starts.
    """
    with _lock:
        return _choose(limits)


@lru_cache(maxsize=8)
def _choose(limits: Limits) -> Choice:
    found: list[Choice] = []
    refused: list[str] = []
    for layer in Layer:
        sandbox = Sandbox(layer=layer, limits=limits)
        try:
            opened = examine(sandbox)
        except ConfinementError as error:
            refused.append(str(error) if str(error).startswith(layer) else f"{layer}: {error}")
            continue
        choice = Choice(sandbox=sandbox, open=opened, refused=tuple(refused))
        if not opened:
            return choice
        found.append(choice)
        refused.append(f"{layer}: {' and '.join(opened)} open")
    if not found:
        raise ConfinementError("; ".join(refused))
    return min(found, key=lambda choice: len(choice.open))


def examine(sandbox: Sandbox) -> tuple[str, ...]:
    """Try to break out of a sandbox.

    Returns:
        The names of `escapes.ATTEMPTS` that succeeded; `files` too if the working folder or the home folder is among what is left
        to be read.

    Raises:
        ConfinementError: If a process cannot be confined so, or does not work when it is.
    """
    with _baits() as baits:
        task = {**baits, "max_memory_bytes": sandbox.limits.max_memory_bytes}
        finished = sandbox.run("rewards.confinement.escapes", task, seconds=_SECONDS)
    if finished.end is not End.EXIT or finished.code != 0:
        words = finished.errors.decode(errors="replace").strip().splitlines()
        raise ConfinementError(
            f"{sandbox.layer}: a confined process does not work: {words[-1] if words else finished.end}"
        )
    opened: list[str] = json.loads(finished.output)
    readable = {Path(path).resolve() for path in readable_paths()}
    is_left = any(readable & {folder.resolve(), *folder.resolve().parents} for folder in (Path.cwd(), Path.home()))
    return tuple(dict.fromkeys([*opened, *["files"] * is_left]))


@contextlib.contextmanager
def _baits() -> Iterator[Mapping[str, Any]]:
    """Lay out what a confined process must not reach."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.chmod(0o755)
        bait = folder / "bait"
        bait.write_text("readable by all", encoding="utf-8")
        bait.chmod(0o666)
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        abstract = f"\0bait-{secrets.token_hex(8)}"
        if sys.platform == "linux":
            named = stack.enter_context(socket.socket(socket.AF_UNIX))
            named.bind(abstract)
            named.listen()
        yield {
            "port": listener.getsockname()[1],
            "abstract": abstract,
            "files": [str(bait), *_own_files()],
            "folders": ["/", "/dev/shm", *map(str, (folder, folder.parent, Path.cwd(), Path.home()))],  # noqa: S108
            "name": f"bait-{secrets.token_hex(8)}",
            "variables": [*environment(""), "LC_CTYPE", "PWD"],  # the last ones are made by Python and by bwrap
            "parent": os.getpid(),
        }


def _own_files() -> list[str]:
    """Find a file of the working folder and one of the home folder, if there are any that are not the interpreter's."""
    readable = {Path(path) for path in readable_paths()}
    found = []
    for folder in (Path.cwd(), Path.home()):
        with contextlib.suppress(OSError, StopIteration):
            files = (each.resolve() for each in folder.iterdir() if each.is_file())
            found.append(str(next(each for each in files if not readable & {each, *each.parents})))
    return found
