"""How to write in YAML what was probably meant."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from grpo_cli.recipe.kinds import bare, show

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_YES, _NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def how_to_write(value: Any, kind: type[Any] | None, choices: tuple[str, ...]) -> str | None:
    """Guess the spelling of a value that has the wrong type.

    Args:
        value: What was found.
        kind: The type that is allowed; None if there is no guess to make by type.
        choices: The words that are allowed, if it is a choice.
    """
    if "none" in choices and (value is False or value is None):
        return "write none"
    if value is None:
        return "leave the key out for its default"
    is_single_item = isinstance(value, list) and len(value) == 1 and not isinstance(value[0], list | dict)
    if is_single_item and kind is not None:
        return f"write {bare(value[0])}"
    guess = _GUESSES.get(kind)
    return guess(value) if guess is not None else None


def _as_bool(value: Any) -> str | None:
    word = str(value).lower()
    if word in _YES:
        return "write true"
    return "write false" if word in _NO else None


def _as_integer(value: Any) -> str | None:
    if isinstance(value, float):
        return f"write {int(value)}" if value.is_integer() else None
    return _as_number(value)


def _as_number(value: Any) -> str | None:
    is_quoted = isinstance(value, str) and _NUMBER.fullmatch(value)
    return f"write {value} without quotes" if is_quoted else None


def _as_string(value: Any) -> str | None:
    if isinstance(value, bool):  # it may have been written as yes, no, on or off
        return "put it in quotes"
    return f'write "{show(value)}"' if isinstance(value, int | float) else None


def _as_list(value: Any) -> str | None:
    return None if isinstance(value, dict) else f"write [{bare(value)}]"


_GUESSES: Mapping[type[Any] | None, Callable[[Any], str | None]] = {
    bool: _as_bool,
    int: _as_integer,
    float: _as_number,
    str: _as_string,
    list: _as_list,
}
