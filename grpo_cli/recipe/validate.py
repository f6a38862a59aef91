"""Every value of a recipe against the schema: names, types, choices and ranges, all problems at once."""

import math
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from omegaconf import MISSING

from grpo_cli.errors import Problem
from grpo_cli.recipe.kinds import default_of, describe, fields_of, is_section, item_type, show, types_of, without_none
from grpo_cli.recipe.position import KeyPath, Placed, key_text
from grpo_cli.recipe.schema import Recipe
from grpo_cli.recipe.schema.option import Range
from grpo_cli.recipe.suggest import nearest, of_same_number
from grpo_cli.recipe.unknown import unknown_key
from grpo_cli.recipe.writing import how_to_write

_ANYTHING = Range()
_FIT = {int: (int,), float: (int, float), str: (str,), bool: (bool,)}


class _Refused:
    """Stands where a value was refused."""


_REFUSED = _Refused()


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """What is left of a recipe when everything wrong is taken out.

    Attributes:
        values: Plain values that fit the schema; required keys that are missing are empty strings.
        problems: What is wrong.
        refused: The keys that were taken out or filled in. Checks that need one of them have nothing to say.
    """

    values: dict[str, Any]
    problems: list[Problem]
    refused: set[str]


def check(root: Placed) -> Checked:
    """Check a merged recipe whose interpolations are resolved."""
    checker = _Checker()
    values = checker.section(root, Recipe, ())
    assert not isinstance(values, _Refused), "a recipe that is no mapping is refused when it is read"
    _fill_required(values, Recipe, (), checker.refused)
    return Checked(values=values, problems=checker.problems, refused=checker.refused)


def _fill_required(values: dict[str, Any], section: type[Any], path: KeyPath, refused: set[str]) -> None:
    """Put empty strings where required ones are missing, so that the rest can be looked at."""
    kinds = types_of(section)
    for name, declared in fields_of(section).items():
        kind, optional = without_none(kinds[name])
        if is_section(kind) and (not optional or isinstance(values.get(name), dict)):
            _fill_required(values.setdefault(name, {}), kind, (*path, name), refused)
        elif typing.get_origin(kind) is dict and is_section(item_type(kind)):
            for key, item in (values.get(name) or {}).items():
                _fill_required(item, item_type(kind), (*path, name, key), refused)
        elif name not in values and default_of(declared) == MISSING:
            refused.add(key_text((*path, name)))
            values[name] = [] if typing.get_origin(kind) is list else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Checker:
    """Walks over values and types together."""

    problems: list[Problem] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)

    def section(self, placed: Placed, section: type[Any], path: KeyPath) -> dict[str, Any] | _Refused:
        """Check a mapping whose keys the schema names."""
        if placed.value is None:  # a section whose keys are all commented out
            placed = Placed(value={}, where=placed.where)
        if not isinstance(placed.value, dict):
            short = "a dotted path, or " if isinstance(path[-1], int) else ""
            return self._refuse(path, placed, f"{short}a mapping with the keys {', '.join(fields_of(section))}")
        fields, kinds = fields_of(section), types_of(section)
        values: dict[str, Any] = {}
        for key, child in placed.value.items():
            here = (*path, key)
            if key not in fields:
                self._report(here, child.where, *unknown_key(path, key, list(fields)))
                continue
            value = self.value(child, kinds[key], fields[key].metadata["range"], here)
            if not isinstance(value, _Refused):
                values[key] = value
        self._report_missing(placed, section, path)
        return values

    def value(self, placed: Placed, kind: Any, limits: Range, path: KeyPath) -> Any:
        """Check one value; `_REFUSED` if it is wrong as a whole."""
        inner, optional = without_none(kind)
        if optional and placed.value is None:
            return None
        if is_section(inner):
            return self.section(placed, inner, path)
        if inner is Any:
            return placed.plain()
        return self._typed(placed, inner, limits, path, describe(kind, limits))

    def _typed(self, placed: Placed, kind: Any, limits: Range, path: KeyPath, allowed: str) -> Any:
        origin = typing.get_origin(kind)
        if origin is list:
            return self._list(placed, item_type(kind), limits, path, allowed)
        if origin is dict:
            return self._mapping(placed, item_type(kind), path, allowed)
        if origin is Literal:
            return self._choice(placed, typing.get_args(kind), path, allowed)
        return self._scalar(placed, kind, limits, path, allowed)

    def _choice(self, placed: Placed, choices: tuple[str | bool, ...], path: KeyPath, allowed: str) -> Any:
        # With the type, for 1 equals True.
        if any(type(placed.value) is type(choice) and placed.value == choice for choice in choices):
            return placed.value
        names = tuple(choice for choice in choices if isinstance(choice, str))
        return self._refuse(path, placed, allowed, choices=names)

    def _scalar(self, placed: Placed, kind: type[Any], limits: Range, path: KeyPath, allowed: str) -> Any:
        value = placed.value
        fits = isinstance(value, _FIT[kind]) and (kind is bool or not isinstance(value, bool))
        if not fits:
            return self._refuse(path, placed, allowed, kind=kind)
        if kind is float and not math.isfinite(value):
            return self._refuse(path, placed, f"{allowed}, finite")
        measure = len(value) if limits.length else value
        if (kind in (int, float) or limits.length) and not limits.allows(measure):
            return self._refuse(path, placed, allowed)
        return float(value) if kind is float else value

    def _list(self, placed: Placed, item: Any, limits: Range, path: KeyPath, allowed: str) -> Any:
        if not isinstance(placed.value, list):
            return self._refuse(path, placed, allowed, kind=list)
        if limits.length and not limits.allows(len(placed.value)):
            return self._refuse(path, placed, allowed)
        checked = [self.value(each, item, _ANYTHING, (*path, index)) for index, each in enumerate(placed.value)]
        return [value for value in checked if not isinstance(value, _Refused)]

    def _mapping(self, placed: Placed, item: Any, path: KeyPath, allowed: str) -> Any:
        if not isinstance(placed.value, dict):
            return self._refuse(path, placed, allowed)
        checked = {}
        for key, child in placed.value.items():
            here = (*path, key)
            if not isinstance(key, str):
                self._report(here, child.where, f"found the key {show(key)}; allowed: a name", f'write "{key}"')
                continue
            if child.value is None and is_section(item):  # on the command line it takes out what a file has
                continue
            value = self.value(child, item, _ANYTHING, here)
            if not isinstance(value, _Refused):
                checked[key] = value
        return checked

    def _report_missing(self, placed: Placed, section: type[Any], path: KeyPath) -> None:
        for name, declared in fields_of(section).items():
            if name not in placed.value and default_of(declared) == MISSING:
                allowed = describe(types_of(section)[name], declared.metadata["range"])
                self._report((*path, name), placed.where, f"required, but not set; allowed: {allowed}", None)
            elif is_section(types_of(section)[name]) and name not in placed.value:
                self._report_missing(Placed(value={}, where=placed.where), types_of(section)[name], (*path, name))

    def _refuse(
        self,
        path: KeyPath,
        placed: Placed,
        allowed: str,
        *,
        kind: type[Any] | None = None,
        choices: tuple[str, ...] = (),
    ) -> _Refused:
        value = placed.plain()
        close = nearest(value, choices) if isinstance(value, str) else None
        close = close or of_same_number(str(value), choices)
        hint = f"did you mean `{close}`?" if close else how_to_write(value, kind, choices)
        self._report(path, placed.where, f"found {show(value)}; allowed: {allowed}", hint)
        return _REFUSED

    def _report(self, path: KeyPath, where: str, message: str, hint: str | None) -> None:
        self.refused.add(key_text(path))
        self.problems.append(Problem(where=where, key=key_text(path), message=message, hint=hint))
