"""The types of the schema in words, for messages and for the README's table."""

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from omegaconf import MISSING

from grpo_cli.recipe.schema.option import Range

_SINGULAR = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
_PLURAL = {int: "integers", float: "numbers", str: "strings", bool: "booleans"}
_TYPES: dict[type[Any], Mapping[str, Any]] = {}
"""Of each section: they are evaluated from text, and asked for again for every key."""


def fields_of(section: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    """Give a section's keys."""
    return {field.name: field for field in dataclasses.fields(section)}


def types_of(section: type[Any]) -> Mapping[str, Any]:
    """Give the types of a section's keys."""
    if section not in _TYPES:
        _TYPES[section] = types.MappingProxyType(typing.get_type_hints(section))
    return _TYPES[section]


def without_none(kind: Any) -> tuple[Any, bool]:
    """Split `X | None` into X and whether None is allowed."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        (inner,) = (part for part in typing.get_args(kind) if part is not type(None))
        return inner, True
    return kind, False


def is_section(kind: Any) -> bool:
    """Tell whether a type is a mapping with keys of its own."""
    return dataclasses.is_dataclass(kind)


def item_type(kind: Any) -> Any:
    """Give the type of a list's items or of a mapping's values."""
    return typing.get_args(kind)[-1]


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Give a key's default; `MISSING` if it has to be set."""
    if field.default_factory is dataclasses.MISSING:
        return field.default
    default = field.default_factory()
    limits: Range = field.metadata["range"]
    is_refused = limits.length and not limits.allows(len(default))
    return MISSING if is_refused else default


def describe(kind: Any, limits: Range) -> str:
    """Say what a key may be set to, such as `an integer, at least 2`."""
    inner, optional = without_none(kind)
    text = _describe_type(inner)
    if limits.length:
        text += ", not empty"
    elif str(limits):
        text += f", {limits}"
    return f"{text}, or null" if optional else text


def _describe_type(kind: Any) -> str:
    if kind in _SINGULAR:
        return _SINGULAR[kind]
    origin = typing.get_origin(kind)
    if origin is Literal:
        return ", ".join(_literals(kind))
    if origin is list:
        return f"a list of {_describe_items(item_type(kind))}"
    if origin is dict and item_type(kind) in _PLURAL:
        return f"a mapping of names to {_PLURAL[item_type(kind)]}"
    if origin is dict and is_section(item_type(kind)):
        return "a mapping of names to mappings"
    return "a mapping"


def _literals(kind: Any) -> list[str]:
    """Give the values of a Literal as they are written in YAML."""
    return [str(value).lower() if isinstance(value, bool) else value for value in typing.get_args(kind)]


def _describe_items(kind: Any) -> str:
    if kind in _PLURAL:
        return _PLURAL[kind]
    if typing.get_origin(kind) is Literal:
        return " / ".join(_literals(kind))
    return "dotted paths or mappings"


def show(value: Any) -> str:
    """Write a value of a recipe on one line, shortened."""
    text = str(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False, default=str)
    text = text if len(text) <= 60 else text[:57] + "..."
    if isinstance(value, list):
        return f"the list {text}"
    return f"the mapping {text}" if isinstance(value, dict) else text


def bare(value: Any) -> str:
    """Write a value of a recipe as it may stand there: words without quotes."""
    return value if isinstance(value, str) else show(value)
