"""Runs the tests of a program that lives in another process, and prints one line of JSON for each.

The verdict is made here, where the program never runs: it cannot leave before the tests, change what they compare with, or write
a line of its own. Of it come only answers to what the tests ask, as plain data. Runs in a confined process, too.
"""

import contextlib
import json
import os
import signal
import sys
import time
import types
from collections.abc import Iterator, Mapping
from typing import IO, Any

from rewards.programs.names import Names, kept_names
from rewards.programs.peer import Broken, Peer, Remote
from rewards.programs.questions import ASKED_OF_TESTS
from rewards.programs.source import new_module
from rewards.programs.suites import run_test


class _TimeIsUp(BaseException):
    """No Exception: a test that expects one must not take it for it."""


def main(task: Mapping[str, Any]) -> None:
    """Run the tests in turn, until one does not come back.

    The first line is `{"loaded": true}`, or tells how loading the program `failed`; then come `{"passed": ..., "why": ...}`.

    Args:
        task: `tests`, each `{"source": ..., "entry": name or None}` or `{"call": name, "arguments": ..., "expected": ...}`; `seconds`
            for each; `read` and `write`, pipes from and to the program.
    """
    verdicts = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what tests print
    signal.signal(signal.SIGALRM, _raise_time_is_up)
    peer = Peer(os.fdopen(task["read"], "rb"), os.fdopen(task["write"], "wb"), ASKED_OF_TESTS)
    names, why = _loaded(peer, task["seconds"])
    if names is None:
        _say(verdicts, {"failed": why})
        return
    _say(verdicts, {"loaded": True})
    module = new_module("tests")
    vars(module)["__builtins__"] = names
    names.put_into(new_module("solution"))
    for test in task["tests"]:
        why, is_last = _run(peer, names, module, test, task["seconds"])
        _say(verdicts, {"passed": not why, "why": why})
        if is_last:
            return


def _say(verdicts: IO[str], line: Mapping[str, Any]) -> None:
    verdicts.write(json.dumps(line) + "\n")
    verdicts.flush()


def _loaded(peer: Peer, seconds: float) -> tuple[Names | None, str]:
    """Wait for the names of the program."""
    try:
        with _time_limit(seconds):
            message = peer.receive()
    except _TimeIsUp:
        return None, "timeout"
    except Broken as error:
        return None, f"error: {error}"
    modules = message.get("names")
    if not isinstance(modules, dict) or not all(isinstance(each, str | None) for each in modules.values()):
        return None, f"error: {str(message.get('failed'))[:500]}"
    return Names(peer, {name: module for name, module in modules.items() if not name.startswith("__")}), ""


def _run(
    peer: Peer, names: Names, module: types.ModuleType, test: Mapping[str, Any], seconds: float
) -> tuple[str, bool]:
    """Run one test. One that asks nothing of the program has not tested it, and fails.

    Returns:
        Why it failed, empty if it passed; and whether the program can be asked nothing more.
    """
    why, started, num_asked = "", time.monotonic(), peer.num_asked
    try:
        with _time_limit(seconds):
            if "source" in test:
                _run_source(names, module, test)
            else:
                why = _call(names, test)
            if not why and peer.num_asked == num_asked:
                why = "error: the test uses nothing of the program"
    except _TimeIsUp:
        return "timeout", True
    except Broken as error:
        return f"error: {error}", True
    except AssertionError as error:
        why = f"wrong: {error}" if str(error) else "wrong"
    except BaseException as error:  # noqa: BLE001  whatever a test raises, it has failed
        why = "memory" if isinstance(error, MemoryError) else f"error: {type(error).__name__}: {error}"
    # What tests that catch everything have not let through.
    if peer.is_broken:
        return "error: the program ended", True
    if time.monotonic() - started >= seconds:
        return "timeout", True
    return why[:500], False


def _run_source(names: Names, module: types.ModuleType, test: Mapping[str, Any]) -> None:
    names.kept = kept_names(test["source"], has_entry=test["entry"] is not None)
    run_test(module, test["source"], None if test["entry"] is None else _function(names, test["entry"]))


def _function(names: Names, name: str) -> Any:
    """Find a function of the program, or a method of its class `Solution`.

    Raises:
        NameError: If it has neither.
    """
    if names.has_of_program(name):
        return names.of_program(name)
    solution = names.of_program("Solution") if names.has_of_program("Solution") else None
    if isinstance(solution, Remote):
        return getattr(solution(), name)
    raise NameError(f"the program has no function {name}")


def _call(names: Names, test: Mapping[str, Any]) -> str:
    """Call a function of the program, and compare what it returns.

    A list counts as the tuple of the same elements, and an expected value may stand alone in a list, as in APPS
    (Hendrycks et al. 2021, arXiv 2105.09938).
    """
    function = _function(names, test["call"])
    returned, expected = _as_lists(function(*test["arguments"])), _as_lists(test["expected"])
    alone = expected[0] if isinstance(expected, list) and len(expected) == 1 else expected
    return "" if returned in (expected, alone) else "wrong"


def _as_lists(value: Any) -> Any:
    """Turn tuples and arrays into lists and the keys of mappings into texts, which is all that JSON knows."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_as_lists(each) for each in value]
    if isinstance(value, dict):
        return {str(key): _as_lists(each) for key, each in value.items()}
    return value


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _raise_time_is_up(*_: object) -> None:
    raise _TimeIsUp
