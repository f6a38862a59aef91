"""A real `grpo vllm-serve` in a process of its own, and what it writes."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import SystemRandom
from typing import Any, Self

import httpx
import psutil
from warm_server import SERVE
from warm_start import WarmCommand, WarmStart

TOKEN = "correct-horse"
READY_SECONDS = 240
_PORTS = (10_000, 32_768)


def free_port() -> int:
    """Find a port of this machine that nobody listens on, below those that the system gives to whoever asks for any."""
    while True:
        # Not by the generator that tests seed: all of their workers would find the same ones.
        port = SystemRandom().randrange(*_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class ColdCommand(subprocess.Popen[bytes]):
    """`grpo COMMAND` from scratch, as `WarmCommand` is it forked; what it writes goes to files in a folder."""

    def __init__(self, folder: Path, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._written = (folder / "output", folder / "errors")
        with self._written[0].open("wb") as output, self._written[1].open("wb") as errors:
            super().__init__(
                [sys.executable, "-m", "grpo_cli", *command], env=environment, stdout=output, stderr=errors
            )

    def told(self) -> tuple[str, str]:
        """Give what it has written so far to its output and to its errors."""
        output, errors = (file.read_text(encoding="utf-8") for file in self._written)
        return output, errors


class VllmServer:
    """A running `grpo vllm-serve`, which ends with the block.

    Args:
        folder: Where its log goes.
        model: What it serves.
        options: More of the command line.
        token: What every request must bring; None for a server without.
        port: Where it listens; any that is free if None.
        warm: Forks all of it; from scratch, as users start it, if None.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        *options: str,
        token: str | None = TOKEN,
        port: int | None = None,
        warm: WarmStart | None = None,
    ) -> None:
        self.port = free_port() if port is None else port
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "vllm.log"
        self.headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        secret = {} if token is None else {"GRPO_VLLM_TOKEN": token}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **secret}
        command = [
            *("vllm-serve", "--model", str(model), "--port", str(self.port)),
            *("--log-file", str(self.log), *options),
        ]
        self.process: WarmCommand | ColdCommand
        if warm is None:
            self.process = ColdCommand(folder, command, environment)
        else:
            self.process = warm.start(*command, environment=environment, program=SERVE, num_spares=1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.wait()
        sys.stderr.write("".join(self.process.told()))  # which is shown where a test has failed

    @property
    def lines(self) -> list[str]:
        """What it has written to its output so far."""
        return self.process.told()[0].splitlines()

    @property
    def errors(self) -> list[str]:
        """What it has written to its errors so far."""
        return self.process.told()[1].splitlines()

    def wait_until_ready(self) -> None:
        """Wait for its last line of the start."""
        deadline = time.monotonic() + READY_SECONDS
        while not any(line.startswith("ready: ") for line in self.lines):
            assert self.process.poll() is None, self.errors
            assert time.monotonic() < deadline, self.lines
            time.sleep(0.2)

    def wait(self) -> int:
        """Wait for its end, and give its exit code."""
        return self.process.wait(READY_SECONDS)

    def offspring(self) -> list[psutil.Process]:
        """List all processes below it, the server's own first."""
        return list(psutil.Process(self.process.pid).children(recursive=True))

    def ask(self, method: str, path: str, *, headers: dict[str, str] | None = None, **options: Any) -> httpx.Response:
        """Send a request, with its token unless other headers are given."""
        headers = self.headers if headers is None else headers
        return httpx.request(method, self.url + path, headers=headers, timeout=120, trust_env=False, **options)


def engine_of(server: psutil.Process) -> psutil.Process:
    """Find the process of vLLM's engine, given that of its HTTP server."""
    (engine,) = [child for child in server.children() if "tracker" not in str(child.cmdline())]
    return engine


def remaining(processes: list[psutil.Process], seconds: float = 15.0) -> list[psutil.Process]:
    """Give those of some processes that are alive after some time to die."""
    deadline = time.monotonic() + seconds
    while True:
        alive = [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(0.1)
