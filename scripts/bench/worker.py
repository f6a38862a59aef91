"""A measured process and the one that asks it: a line of JSON each way, over the child's standard input and output."""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

Calls = Mapping[str, Callable[..., Any]]


def serve(calls: Calls) -> None:
    """Answer calls until standard input ends. Whatever else is printed goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"result": calls[request["call"]](**request["arguments"])}
        except Exception:  # noqa: BLE001  the asking process tells the person
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


class WorkerError(Exception):
    """A measured process failed."""


class Worker:
    """A measured process, seen from the one that asks. It works only while it is asked.

    Args:
        command: Starts it.
        environment: Its environment variables.
        log: Where its standard error goes.
    """

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(  # noqa: S603  the command is ours
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, env=dict(environment), text=True
            )

    def ask(self, call: str, **arguments: Any) -> Any:
        """Make a call and wait for its result.

        Raises:
            WorkerError: If the call raised or the process died.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # it is dead: reading tells the same, with its last words
            self._process.stdin.write(json.dumps({"call": call, "arguments": arguments}) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(f"the process died:\n{self._log.read_text(encoding='utf-8', errors='replace')[-2000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer["result"]

    def close(self) -> None:
        """Let it end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # it ended before
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
