"""Runs the tests of a program that lives in another process, and prints one line of JSON for each.

The verdict is made here, where the program never runs: it cannot leave before the tests, change what they compare with, or write
a line of its own. Of it come only answers to what the tests ask, as plain data. Runs in a confined process, too.
"""

import builtins
import contextlib
import importlib
import json
import os
import signal
import sys
import time
import types
from collections.abc import Iterator, Mapping
from typing import IO, Any

from rewards.programs.peer import Broken, Peer, Remote
from rewards.programs.source import new_module, run_in

_KEPT_NAMES = frozenset(dir(builtins)) | sys.stdlib_module_names
"""Names that mean in a test what they mean in Python, whatever the program calls so. A test imports what it uses."""


class _TimeIsUp(BaseException):
    """No Exception: a test that expects one must not take it for it."""


def main(task: Mapping[str, Any]) -> None:
    """Run the tests in turn, until one does not come back.

    The first line is `{"loaded": true}`, or tells how loading the program `failed`; then come `{"passed": ..., "why": ...}`.

    Args:
        task: `tests`, each `{"source": ...}` or `{"call": name, "arguments": ..., "expected": ...}`; `seconds` for each; `read` and
            `write`, pipes from and to the program.
    """
    verdicts = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what tests print
    signal.signal(signal.SIGALRM, _raise_time_is_up)
    peer = Peer(os.fdopen(task["read"], "rb"), os.fdopen(task["write"], "wb"), frozenset({"call"}))
    module, why = _loaded(peer, task["seconds"])
    if module is None:
        _say(verdicts, {"failed": why})
        return
    _say(verdicts, {"loaded": True})
    for test in task["tests"]:
        why, is_last = _run(peer, module, test, task["seconds"])
        _say(verdicts, {"passed": not why, "why": why})
        if is_last:
            return


def _say(verdicts: IO[str], line: Mapping[str, Any]) -> None:
    verdicts.write(json.dumps(line) + "\n")
    verdicts.flush()


def _loaded(peer: Peer, seconds: float) -> tuple[types.ModuleType | None, str]:
    """Make the module in which tests run, with the names of the program; it can also be imported as `solution`."""
    try:
        with _time_limit(seconds):
            message = peer.receive()
            names = message.get("names")
            if not isinstance(names, dict):
                return None, f"error: {str(message.get('failed'))[:500]}"
            values = {name: _value(peer, given) for name, given in names.items() if _is_free(name, given)}
    except _TimeIsUp:
        return None, "timeout"
    except (Broken, Exception) as error:  # noqa: BLE001  what the program tells of its names may be anything
        return None, f"error: {str(error)[:500]}"
    solution, module = new_module("solution"), new_module("tests")
    vars(solution).update(values)
    vars(module).update(values)
    return module, ""


def _is_free(name: str, given: Mapping[str, Any]) -> bool:
    return not name.startswith("__") and (name not in _KEPT_NAMES or given.get("module") == name)


def _value(peer: Peer, given: Mapping[str, Any]) -> Any:
    """Import a module that the program has imported: a test that uses its name means the real one."""
    return importlib.import_module(given["module"]) if "module" in given else peer.take(given["value"])


def _run(peer: Peer, module: types.ModuleType, test: Mapping[str, Any], seconds: float) -> tuple[str, bool]:
    """Run one test.

    Returns:
        Why it failed, empty if it passed; and whether the program can be asked nothing more.
    """
    why, started = "", time.monotonic()
    try:
        with _time_limit(seconds):
            if "source" in test:
                _run_source(module, test["source"])
            else:
                why = _call(vars(module), test)
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


def _run_source(module: types.ModuleType, source: str) -> None:
    """Run statements, then the functions `test_...` that they define, as pytest would."""
    known = dict(vars(module))
    run_in(module, source)
    for name, value in list(vars(module).items()):
        if name.startswith("test_") and isinstance(value, types.FunctionType) and known.get(name) is not value:
            value()


def _call(names: Mapping[str, Any], test: Mapping[str, Any]) -> str:
    """Call a function of the program, or a method of its class `Solution`, and compare what it returns.

    A list counts as the tuple of the same elements, and an expected value may stand alone in a list, as in APPS
    (Hendrycks et al. 2021, arXiv 2105.09938).
    """
    name = test["call"]
    function = names.get(name)
    if function is None and isinstance(names.get("Solution"), Remote):
        function = getattr(names["Solution"](), name)
    if function is None:
        return f"error: the program has no function {name}"
    returned, expected = _as_lists(function(*test["arguments"])), _as_lists(test["expected"])
    alone = expected[0] if isinstance(expected, list) and len(expected) == 1 else expected
    return "" if returned in (expected, alone) else "wrong"


def _as_lists(value: Any) -> Any:
    """Turn tuples into lists and the keys of mappings into texts, which is all that JSON knows."""
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
