"""A real `grpo vllm-serve` in a process of its own, and what it writes."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any, Self

import httpx
import psutil

TOKEN = "correct-horse"
READY_SECONDS = 240


def free_port() -> int:
    """Find a port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class VllmServer:
    """A running `grpo vllm-serve`, which ends with the block.

    Args:
        folder: Where its log goes.
        model: What it serves.
        options: More of the command line.
        token: What every request must bring; None for a server without.
        port: Where it listens; any that is free if None.
    """

    def __init__(
        self, folder: Path, model: Path, *options: str, token: str | None = TOKEN, port: int | None = None
    ) -> None:
        self.port = free_port() if port is None else port
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "vllm.log"
        self.headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "grpo_cli", "vllm-serve", "--model", str(model), "--port", str(self.port)),
                *("--log-file", str(self.log), *options),
            ],
            env=environment if token is None else {**environment, "GRPO_VLLM_TOKEN": token},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self.errors: list[str] = []
        self._readers = [
            self._reading(self.process.stdout, self.lines),
            self._reading(self.process.stderr, self.errors),
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.wait()

    @staticmethod
    def _reading(stream: IO[str] | None, lines: list[str]) -> threading.Thread:
        assert stream is not None
        reader = threading.Thread(target=lambda: lines.extend(line.rstrip("\n") for line in stream), daemon=True)
        reader.start()
        return reader

    def wait_until_ready(self) -> None:
        """Wait for its last line of the start."""
        deadline = time.monotonic() + READY_SECONDS
        while not any(line.startswith("ready: ") for line in self.lines):
            assert self.process.poll() is None, self.errors
            assert time.monotonic() < deadline, self.lines
            time.sleep(0.2)

    def wait(self) -> int:
        """Wait for its end, and give its exit code."""
        code = self.process.wait(READY_SECONDS)
        for reader, stream in zip(self._readers, (self.process.stdout, self.process.stderr), strict=True):
            reader.join(10)
            assert stream is not None
            stream.close()
        return code

    def offspring(self) -> list[psutil.Process]:
        """List all processes below it, the server's own first."""
        return list(psutil.Process(self.process.pid).children(recursive=True))

    def ask(self, method: str, path: str, *, headers: dict[str, str] | None = None, **options: Any) -> httpx.Response:
        """Send a request, with its token unless other headers are given."""
        headers = self.headers if headers is None else headers
        return httpx.request(method, self.url + path, headers=headers, timeout=120, trust_env=False, **options)


def remaining(processes: list[psutil.Process], seconds: float = 15.0) -> list[psutil.Process]:
    """Give those of some processes that are alive after some time to die."""
    deadline = time.monotonic() + seconds
    while True:
        alive = [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(0.1)
