"""Runs what a test defines: functions and classes as pytest does, `unittest` cases, and `check(candidate)` of HumanEval."""

import asyncio
import inspect
import types
import unittest
from collections.abc import Mapping
from typing import Any

from rewards.programs.source import run_in


def run_test(module: types.ModuleType, source: str, entry: Any) -> None:
    """Run statements, then what they define.

    Args:
        module: Where; may hold names already.
        source: The statements.
        entry: What `check` is called with; None calls it not.

    Raises:
        BaseException: What they raise; AssertionError if a case of `unittest` fails or is skipped.
    """
    known = dict(vars(module))
    try:
        run_in(module, source)
    except SystemExit:
        if not any(_is_case(value, module) for value in _new(module, known).values()):  # `unittest.main()` leaves so
            raise
    for name, value in _new(module, known).items():
        if _is_case(value, module):
            _run_case(value)
        elif isinstance(value, type) and name.startswith("Test"):
            _run_class(value)
        elif isinstance(value, types.FunctionType) and name.startswith("test"):
            _call(value)
        elif isinstance(value, types.FunctionType) and name == "check" and entry is not None:
            value(entry)


def _new(module: types.ModuleType, known: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if known.get(name) is not value}


def _is_case(value: Any, module: types.ModuleType) -> bool:
    return isinstance(value, type) and issubclass(value, unittest.TestCase) and value.__module__ == module.__name__


def _run_case(case: type[unittest.TestCase]) -> None:
    result = unittest.TestResult()
    result.failfast = True  # the time limit comes as an exception, and only once
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    if result.skipped:  # a program can raise what skips
        raise AssertionError(f"skipped: {result.skipped[0][1]}")
    if result.failures:
        raise AssertionError(_last_line(result.failures[0][1]))
    if result.errors:
        raise RuntimeError(_last_line(result.errors[0][1]))
    if result.unexpectedSuccesses:
        raise AssertionError("passed unexpectedly")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


def _run_class(kind: type) -> None:
    for name in dir(kind):
        if name.startswith("test"):
            tested = kind()
            if hasattr(tested, "setup_method"):
                tested.setup_method()
            _call(getattr(tested, name))


def _call(function: Any) -> None:
    returned = function()
    if inspect.iscoroutine(returned):
        asyncio.run(returned)
