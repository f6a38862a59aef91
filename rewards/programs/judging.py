"""Runs the tests of a program in confined processes."""

import contextlib
import errno
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rewards.confinement.process import End, Finished
from rewards.confinement.sandbox import Sandbox
from rewards.programs.cases import AssertCase, CallCase, Case, InputCase

_CHECKER_SECONDS = 5.0
"""What the checker may take besides the tests."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What came of one test.

    Attributes:
        passed: Whether it passed.
        why: Else why not: `wrong`, `timeout`, `memory`, `output`, `disk`, `crash`, `error`, `not run` or `time`, perhaps with more after a colon.
    """

    passed: bool
    why: str = ""


_NOT_RUN = Verdict(passed=False, why="not run")


def judge(sandbox: Sandbox, source: str, cases: Sequence[Case], *, seconds: float, max_seconds: float) -> list[Verdict]:
    """Run all tests of one program.

    A test with an input gets a process of its own. The others share one, with a second process that asks it (`checker`), until
    one of them does not come back.

    Args:
        sandbox: Where.
        source: The program.
        cases: Its tests.
        seconds: For one test.
        max_seconds: For all; those that are left then have not passed.

    Returns:
        A verdict for each, in order.

    Raises:
        ConfinementError: If a process cannot be confined.
    """
    deadline = time.monotonic() + max_seconds
    verdicts: dict[int, Verdict] = {}
    others: list[tuple[int, AssertCase | CallCase]] = []
    for index, case in enumerate(cases):
        if not isinstance(case, InputCase):
            others.append((index, case))
        elif (left := deadline - time.monotonic()) > 0:
            verdicts[index] = _judge_input(sandbox, source, case, min(seconds, left))
    while others and (left := deadline - time.monotonic()) > 0:
        found = _judge_calls(sandbox, source, [case for _, case in others], min(seconds, left), left)
        verdicts |= {index: verdict for (index, _), verdict in zip(others, found, strict=False)}
        others = others[len(found) :]
    return [verdicts.get(index, _NOT_RUN) for index in range(len(cases))]


def _judge_input(sandbox: Sandbox, source: str, case: InputCase, seconds: float) -> Verdict:
    finished = sandbox.run(
        "rewards.programs.program",
        {"source": source},
        text=case.text.encode("utf-8", "surrogatepass"),
        seconds=seconds,
        least_output_bytes=2 * len(case.expected.encode("utf-8", "surrogatepass")),
    )
    if finished.end is not End.EXIT or finished.code != 0:
        return _failed(_failure(finished))
    if _normalised(finished.output.decode(errors="replace")) != _normalised(case.expected):
        return Verdict(passed=False, why="wrong")
    return Verdict(passed=True)


def _normalised(text: str) -> list[str]:
    """Split into lines, without what nobody sees: spaces at ends of lines, empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _failure(finished: Finished) -> str:
    match finished.end:
        case End.TIME:
            return "timeout"
        case End.OUTPUT | End.DISK:
            return str(finished.end)
        case End.SIGNAL if finished.code in (signal.SIGXCPU, signal.SIGKILL):
            return "timeout"  # of processor time
        case End.SIGNAL:
            return f"crash: signal {finished.code}"
    words = finished.errors.decode(errors="replace").strip().splitlines()
    last = words[-1] if words else f"exit code {finished.code}"
    if last.startswith(f"OSError: [Errno {errno.ENOSPC}]"):
        return "disk"
    return "memory" if last.startswith("MemoryError") else f"error: {last}"


def _judge_calls(
    sandbox: Sandbox, source: str, cases: Sequence[AssertCase | CallCase], seconds: float, max_seconds: float
) -> list[Verdict]:
    """Run tests until one does not come back, but at least one.

    Returns:
        Verdicts on the first of them.
    """
    with contextlib.ExitStack() as stack:
        theirs, to_program = os.pipe()
        ours, from_program = os.pipe()
        ends = [stack.enter_context(open(each, "rb", buffering=0)) for each in (theirs, ours)]  # noqa: PTH123  descriptors
        ends += [stack.enter_context(open(each, "wb", buffering=0)) for each in (to_program, from_program)]  # noqa: PTH123
        task = {"source": source, "read": theirs, "write": from_program}
        all_seconds = min(max_seconds, seconds * (1 + len(cases)))
        stack.enter_context(
            sandbox.started(
                "rewards.programs.solution", task, seconds=all_seconds, descriptors=(theirs, from_program), quiet=True
            )
        )
        tests = {"tests": [_as_test(case) for case in cases], "seconds": seconds, "read": ours, "write": to_program}
        checker = stack.enter_context(
            sandbox.started(
                "rewards.programs.checker",
                tests,
                seconds=all_seconds + _CHECKER_SECONDS,
                descriptors=(ours, to_program),
            )
        )
        for end in ends:
            end.close()
        finished = checker.collect(b"", seconds=all_seconds + _CHECKER_SECONDS)
    first, *lines = _objects(finished.output) or [{}]
    if "failed" in first:
        return [_failed("memory" if first["failed"].startswith("error: MemoryError") else first["failed"])] * len(cases)
    found = [Verdict(passed=True) if line["passed"] else _failed(line["why"]) for line in lines]
    return found or [_failed(_failure(finished))]


def _objects(output: bytes) -> list[dict[str, Any]]:
    """Read one object a line, up to one that was cut off."""
    found = []
    for line in output.splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def _failed(why: str) -> Verdict:
    """Say why in a text that every file and terminal can hold: parts of it are the program's."""
    return Verdict(passed=False, why="".join(each if each.isprintable() else " " for each in why)[:200])


def _as_test(case: AssertCase | CallCase) -> dict[str, Any]:
    if isinstance(case, AssertCase):
        return {"source": case.source, "entry": case.entry_point}
    return {"call": case.name, "arguments": case.arguments, "expected": case.expected}
