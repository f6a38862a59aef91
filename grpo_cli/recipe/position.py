"""Values that remember where they were written: the last writer of a key wins, and is the one to blame."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

COMMAND_LINE = "command line"

KeyPath = tuple[str | int, ...]
"""A recipe key in parts, such as `("rewards", "reward_funcs", 0, "path")`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """A YAML value and its place.

    Attributes:
        value: A scalar, a dict of `Placed` or a list of `Placed`.
        where: `file:line` of its key (or of the item itself in a list), or `command line`.
    """

    value: Any
    where: str

    def plain(self) -> Any:
        """Give the value without places."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value


def place(value: Any, where: str) -> Placed:
    """Put a plain value, with all that is in it, in one place."""
    if isinstance(value, dict):
        return Placed(value={key: place(child, where) for key, child in value.items()}, where=where)
    if isinstance(value, list):
        return Placed(value=[place(child, where) for child in value], where=where)
    return Placed(value=value, where=where)


def merge(below: Placed, above: Placed) -> Placed:
    """Lay one value over another: mappings key by key, anything else is replaced."""
    if not (isinstance(below.value, dict) and isinstance(above.value, dict)):
        return above
    merged = dict(below.value)
    for key, child in above.value.items():
        merged[key] = merge(merged[key], child) if key in merged else child
    return replace(above, value=merged)


def leaves(placed: Placed, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Placed]]:
    """Walk over all scalars with their paths."""
    if isinstance(placed.value, dict):
        for key, child in placed.value.items():
            yield from leaves(child, (*path, key))
    elif isinstance(placed.value, list):
        for index, child in enumerate(placed.value):
            yield from leaves(child, (*path, index))
    else:
        yield path, placed


def key_text(path: KeyPath) -> str:
    """Write a path as people do: `rewards.reward_funcs[0].path`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def split_key(text: str) -> KeyPath:
    """Read a path as people write it; items of a list as `[0]` or `.0`."""
    return tuple(int(part) if part.isdigit() else part for part in re.findall(r"[^.\[\]]+", text))


def find(root: Placed, key: str) -> Placed | None:
    """Give what a key was set to; None if it was not."""
    placed, reached = _descend(root, split_key(key))
    return placed if reached else None


def where_of(root: Placed, *keys: str) -> str:
    """Give the place to blame: of the first key that was set, or else of the innermost section around the first key."""
    for key in keys:
        found = find(root, key)
        if found is not None:
            return found.where
    return _descend(root, split_key(keys[0]))[0].where


def _descend(root: Placed, path: KeyPath) -> tuple[Placed, bool]:
    """Follow a path as far as it goes; the flag says whether to its end."""
    placed = root
    for part in path:
        children = dict(enumerate(placed.value)) if isinstance(placed.value, list) else placed.value
        if not isinstance(children, dict) or part not in children:
            return placed, False
        placed = children[part]
    return placed, True
