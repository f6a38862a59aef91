"""Mathematical equivalence, judged in a process of its own.

math-verify limits its time with SIGALRM, which works in a main thread only and cannot interrupt one long computation on big
integers. A separate process has a main thread whoever calls, and can be ended: an answer that a policy made up must not stop
a night's run.
"""

import atexit
import contextlib
import json
import selectors
import subprocess
import sys
import threading
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

_START_SECONDS = 120.0
"""Importing sympy on a busy machine takes a while; it is not the expression's fault."""


class Verifier:
    """Judges one pair at a time; the process starts with the first one and is replaced when it is ended.

    Args:
        deadline_seconds: Time for one pair, after which the process is ended. The process itself gives up earlier where it can.
    """

    def __init__(self, *, deadline_seconds: float = 20.0) -> None:
        self._deadline_seconds = deadline_seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        # A group's completions share their truth.
        self._is_mathematics = lru_cache(maxsize=4096)(self._ask_for_mathematics)

    def verdict(self, truth: str, text: str) -> float | None:
        """Judge the answer in a text.

        Args:
            truth: The true answer, or a text that ends in it.
            text: A completion.

        Returns:
            1.0 if equivalent; 0.0 if not, or if that was not found out in time; None if `truth` holds no mathematics.

        Raises:
            RuntimeError: If the process does not start.
        """
        with self._lock:
            if not self._is_mathematics(truth):
                return None
            return float(bool(self._ask({"truth": truth, "text": text})))

    def close(self) -> None:
        """End the process; the next verdict starts a new one."""
        with self._lock:
            self._end()

    def _ask_for_mathematics(self, truth: str) -> bool:
        return bool(self._ask({"truth": truth}))

    def _ask(self, question: dict[str, str]) -> bool | None:
        """Put one question; None: the process died or had to be ended over it."""
        process = self._process if self._process is not None and self._process.poll() is None else self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            return bool(_reply(process, self._deadline_seconds))
        except (OSError, EOFError):  # TimeoutError is an OSError
            self._end()
            return None

    def _start(self) -> subprocess.Popen[bytes]:
        self._end()
        script = Path(__file__).with_name("equivalence_process.py")
        # -P: the script's folder must not come first on the path, where its neighbours would shadow other modules.
        # A session of its own: Ctrl-C is for the trainer.
        self._process = subprocess.Popen(  # noqa: S603  our own interpreter and file
            [sys.executable, "-P", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        try:
            _reply(self._process, _START_SECONDS)
        except (OSError, EOFError) as error:
            self._end()
            raise RuntimeError(
                "the process that verifies mathematics did not start; is math-verify installed?"
            ) from error
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def _reply(process: subprocess.Popen[bytes], seconds: float) -> Any:
    """Read one line of JSON.

    Raises:
        TimeoutError: If it does not come in time.
        EOFError: If the process ended.
    """
    assert process.stdout is not None
    limit = time.monotonic() + seconds
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(0.0, limit - time.monotonic())):
                raise TimeoutError
            chunk = process.stdout.read(4096)
            if not chunk:
                raise EOFError
            line += chunk
    return json.loads(line)


VERIFIER = Verifier()
"""The process that all reward functions of this program share."""

atexit.register(VERIFIER.close)
