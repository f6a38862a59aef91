"""Starts confined processes and supervises them."""

import contextlib
import itertools
import json
import math
import os
import secrets
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import IO, Any

import psutil

from rewards.confinement.layers import Layer, command_prefix, environment, readable_paths
from rewards.confinement.limits import Limits
from rewards.confinement.process import Finished, collect, kill, remove_folder

_ENTRY = Path(__file__).with_name("entry.py")
_START_SECONDS = 60.0
"""Starting an interpreter on a busy machine takes a while; it is not the program's fault."""
_READY = "!"
_COUNT_SECONDS = 5.0
"""How long a count of threads is used."""
_numbers = itertools.count(secrets.randbelow(1 << 16))
"""From a place of its own in each process: limits on threads count those of a user in all of them."""


class ConfinementError(RuntimeError):
    """A process could not be confined, so that nothing ran in it."""


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """One way to confine processes; may be used from several threads.

    Attributes:
        layer: What hides files.
        limits: On each process.
    """

    layer: Layer
    limits: Limits

    def run(self, work: str, task: Any, *, text: bytes = b"", seconds: float, least_output_bytes: int = 0) -> Finished:
        """Let a confined process do some work, and wait for its end.

        Args:
            work: Module of this package whose `main` is called.
            task: What it is called with; JSON.
            text: Standard input.
            seconds: For the work, after which it is ended.
            least_output_bytes: What it may say even if the limit is lower.

        Raises:
            ConfinementError: If the process does not come as far as being confined.
        """
        with self.started(work, task, seconds=seconds) as confined:
            return confined.collect(text, seconds=seconds, least_output_bytes=least_output_bytes)

    @contextlib.contextmanager
    def started(
        self, work: str, task: Any, *, seconds: float, descriptors: Sequence[int] = (), quiet: bool = False
    ) -> Iterator["Confined"]:
        """Start a confined process that ends with the block at the latest.

        Args:
            work: As for `run`.
            task: As for `run`.
            seconds: Of processor time.
            descriptors: Open files that it keeps, under their numbers.
            quiet: Without input, and with an output that goes nowhere.

        Raises:
            ConfinementError: As for `run`.
        """
        user = self._user()
        folder = tempfile.mkdtemp(prefix="confined-")
        try:
            if user is not None:
                os.chown(folder, user, user)
            orders = {
                "work": work,
                "task": task,
                "layer": self.layer,
                "user": user,
                "folder": folder,
                "max_disk_bytes": self.limits.max_disk_bytes,
                "readable": self._readable,
                "limits": self._limits(seconds, is_alone=user is not None),
            }
            process = self._start(orders, folder, descriptors, subprocess.DEVNULL if quiet else subprocess.PIPE)
            try:
                yield Confined(process=process, folder=folder, limits=self.limits)
            finally:
                kill(process)
        finally:
            remove_folder(folder)

    @cached_property
    def _readable(self) -> list[str]:
        return readable_paths()

    def _start(
        self, orders: Mapping[str, Any], folder: str, descriptors: Sequence[int], stream: int
    ) -> subprocess.Popen[bytes]:
        try:
            prefix = command_prefix(self.layer, folder, self._readable, max_disk_bytes=self.limits.max_disk_bytes)
        except FileNotFoundError as error:
            raise ConfinementError(str(error)) from error
        heard, said = os.pipe()
        with tempfile.TemporaryFile() as file, open(heard, "rb", buffering=0) as ready:  # noqa: PTH123  a descriptor
            file.write(json.dumps(orders).encode())
            file.seek(0)
            # -P: the script's folder is no place to import from. -B: it could not be written to anyway.
            interpreter = [sys.executable, "-s", "-P", "-B", "-X", "utf8"]
            try:
                process = subprocess.Popen(  # noqa: S603  our own interpreter and file
                    [*prefix, *interpreter, str(_ENTRY), str(file.fileno()), str(said)],
                    stdin=stream,
                    stdout=stream,
                    stderr=stream,
                    env=environment(folder),
                    cwd=folder,
                    pass_fds=(file.fileno(), said, *descriptors),
                    start_new_session=True,
                )
            finally:
                os.close(said)
            said_so = _first_words(ready)
        if said_so != _READY:
            last_words = _last_words(process)
            said_so = said_so or last_words or "the process ended before it was confined"
            raise ConfinementError(f"{self.layer}: {said_so}")
        return process

    def _limits(self, seconds: float, *, is_alone: bool) -> dict[str, int]:
        """Give limits by the names of the module `resource`; that on threads counts all of a user's."""
        others = 0 if is_alone else _threads_of_this_user(int(time.monotonic() / _COUNT_SECONDS))
        return {
            "RLIMIT_AS": self.limits.max_memory_bytes,
            "RLIMIT_CPU": math.ceil(seconds),
            "RLIMIT_FSIZE": self.limits.max_disk_bytes,
            "RLIMIT_NOFILE": self.limits.max_open_files,
            "RLIMIT_NPROC": others + self.limits.max_threads,
            "RLIMIT_CORE": 0,
        }

    def _user(self) -> int | None:
        """Choose a user that owns nothing, a different one each time; None where there is no right to become one."""
        if self.layer is Layer.LIMITS or os.geteuid() != 0:
            return None
        unused = _unused_users()
        return unused[next(_numbers) % len(unused)] if unused else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Confined:
    """A confined process that works.

    Attributes:
        process: Itself.
        folder: Where it can write.
        limits: On it.
    """

    process: subprocess.Popen[bytes]
    folder: str
    limits: Limits

    def collect(self, text: bytes, *, seconds: float, least_output_bytes: int = 0) -> Finished:
        """Give it its input and wait for its end, as `process.collect` does."""
        return collect(
            self.process,
            text,
            seconds=seconds,
            folder=self.folder,
            max_output_bytes=max(self.limits.max_output_bytes, least_output_bytes),
            max_disk_bytes=self.limits.max_disk_bytes,
        )


def _first_words(ready: IO[bytes]) -> str:
    """Wait for what a process says of its confinement, which is nothing if it ended."""
    with selectors.DefaultSelector() as selector:
        selector.register(ready, selectors.EVENT_READ)
        if not selector.select(_START_SECONDS):
            return f"not confined after {_START_SECONDS:g} s"
        return ready.read(4096).decode(errors="replace")


def _last_words(process: subprocess.Popen[bytes]) -> str:
    """End a process, and read the last line that it has said, such as an error of bwrap's."""
    lines: list[str] = []
    if process.stderr is not None:
        os.set_blocking(process.stderr.fileno(), False)
        lines = (process.stderr.read(1 << 16) or b"").decode(errors="replace").strip().splitlines()
    kill(process)
    return lines[-1] if lines else ""


@lru_cache(maxsize=1)
def _threads_of_this_user(_: int) -> int:
    """Count the threads of all of this user's processes; once for each argument."""
    user = os.getuid()
    return sum(
        each.info["num_threads"] or 0
        for each in psutil.process_iter(["uids", "num_threads"])
        if each.info["uids"] is not None and each.info["uids"].real == user
    )


@lru_cache(maxsize=1)
def _unused_users() -> range:
    """List numbers of users that own nothing: those that systemd (systemd.io/UIDS-GIDS) gives to nobody, if they exist here.

    In a container with few users they are the last ones but a thousand.
    """
    preferred = range(0x70000000, 0x70001000)
    try:
        lines = Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()
    except OSError:
        return range(0)
    for first, _, count in (map(int, line.split()) for line in lines):
        if first <= preferred.start and preferred.stop <= first + count:
            return preferred
        if count > 10_000:
            return range(first + count - 5_000, first + count - 1_000)
    return range(0)
