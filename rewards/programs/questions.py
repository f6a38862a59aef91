"""What two processes may ask of each other's objects.

A program, which is not trusted, answers everything. A test answers little: calls of what it handed over, the steps of its iterators,
and looks into objects of its own classes, where no way leads to what judges.
"""

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

BETWEEN_TWO = ("add", "sub", "mul", "truediv", "matmul")
"""Arithmetic between two objects of a program, as a module `operator` names it."""
TESTS_MODULE = "tests"
"""The module in which tests run, so that of their classes."""


def _looked_into(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Allow an operation on objects of the tests' classes, but for names that begin with an underscore."""

    def look(target: Any, *arguments: Any) -> Any:
        is_hidden = any(isinstance(each, str) and each.startswith("_") for each in arguments)
        if type(target).__module__ != TESTS_MODULE or is_hidden:
            raise TypeError("a test's object cannot be used so")
        return operation(target, *arguments)

    return look


def _iterated(target: Any) -> Any:
    return target if isinstance(target, Iterator) else _looked_into(iter)(target)


def _next(target: Any) -> Any:
    if not isinstance(target, Iterator):
        raise TypeError("a test's object is no iterator")
    return next(target)


def _call(target: Any, /, *arguments: Any, **named: Any) -> Any:
    return target(*arguments, **named)


ASKED_OF_PROGRAMS: Mapping[str, Callable[..., Any]] = {
    "call": _call,
    "getattr": getattr,
    "setattr": setattr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "len": len,
    "iter": iter,
    "next": next,
    "str": str,
    "repr": repr,
    "bool": bool,
    **{name: getattr(operator, name) for name in BETWEEN_TWO},
    "eq": operator.eq,
    "isinstance": lambda kind, instance: isinstance(instance, kind),
}
ASKED_OF_TESTS: Mapping[str, Callable[..., Any]] = {
    "call": _call,
    "getattr": _looked_into(getattr),
    "getitem": _looked_into(operator.getitem),
    "len": _looked_into(len),
    "iter": _iterated,
    "next": _next,
    "bool": _looked_into(bool),
}
