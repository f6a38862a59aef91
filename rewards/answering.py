"""Questions to a script in a process of its own: one line of JSON each way.

What judges an answer that a policy made up may compute for ever, and libraries that limit their own time do so with SIGALRM, which
works in a main thread only and cannot interrupt one long computation on big integers. A separate process has a main thread
whoever calls, and can be ended: no answer stops a night's run.
"""

import atexit
import contextlib
import json
import selectors
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

_START_SECONDS = 120.0
"""Importing a large library on a busy machine takes a while; it is not the question's fault."""


class AnsweringProcess:
    """Asks one question at a time, from any thread; the process starts with the first one and is replaced when it was ended.

    Args:
        script: Its file in this package. It writes one line when it is ready, then one for each line that it reads, and ends when stdin does.
        needs: The package that it does not start without, for the message.
        deadline_seconds: Time for one question, after which the process is ended.
    """

    def __init__(self, script: str, *, needs: str, deadline_seconds: float = 20.0) -> None:
        self._script = Path(__file__).with_name(script)
        self._needs = needs
        self._deadline_seconds = deadline_seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    def ask(self, question: Any) -> Any:
        """Put one question.

        Args:
            question: What JSON can hold; the answer is of that kind, too.

        Returns:
            The answer; None if the process died over the question or had to be ended.

        Raises:
            RuntimeError: If the process does not start.
        """
        with self._lock:
            running = self._process is not None and self._process.poll() is None
            process = self._process if running and self._process is not None else self._start()
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(question).encode() + b"\n")
                process.stdin.flush()
                return _reply(process, self._deadline_seconds)
            except (OSError, EOFError):  # TimeoutError is an OSError
                self._end()
                return None

    def close(self) -> None:
        """End the process; the next question starts a new one."""
        with self._lock:
            self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        self._end()
        # -P: the script's folder must not come first on the path, where its neighbours would shadow other modules.
        # A session of its own: Ctrl-C is for the trainer.
        self._process = subprocess.Popen(  # noqa: S603  our own interpreter and file
            [sys.executable, "-P", str(self._script)],
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
                f"the process of {self._script.name} did not start; is {self._needs} installed?"
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
