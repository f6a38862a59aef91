"""`key=value` from the command line, laid over the files."""

from collections.abc import Sequence
from dataclasses import replace

from grpo_cli.errors import Problem
from grpo_cli.recipe.document import read_yaml
from grpo_cli.recipe.position import COMMAND_LINE, KeyPath, Placed, key_text, merge, split_key


class _NoSuchItemError(Exception):
    """An override names an item that its list does not have."""


def apply_overrides(root: Placed, overrides: Sequence[str], problems: list[Problem]) -> Placed:
    """Lay overrides over a recipe, one after another.

    Args:
        root: The recipe as its files say.
        overrides: `key=value` with a YAML value. A key may name items of lists: `rewards.reward_weights[0]=2`.
        problems: Gets what is wrong.
    """
    for override in overrides:
        key, equals, text = override.partition("=")
        path = split_key(key)
        if not equals or not path:
            message = f'found "{override}"; allowed: key=value, such as train.seed=1'
            problems.append(Problem(where=COMMAND_LINE, key="", message=message))
            continue
        if path == ("extends",):
            message = "cannot be set here; allowed: in the recipe file"
            problems.append(Problem(where=COMMAND_LINE, key="extends", message=message))
            continue
        new = read_yaml(text, lambda _line: COMMAND_LINE, problems, path=path) if text.strip() else _null()
        if new is None:
            continue
        try:
            root = _assign(root, path, (), new)
        except _NoSuchItemError as error:
            problems.append(Problem(where=COMMAND_LINE, key=key, message=str(error)))
    return root


def _null() -> Placed:
    return Placed(value=None, where=COMMAND_LINE)


def _assign(placed: Placed | None, path: KeyPath, done: KeyPath, new: Placed) -> Placed:
    """Give a copy in which `path` is set; mappings on the way are made where there are none."""
    if not path:
        return merge(placed, new) if placed is not None else new
    part, rest = path[0], path[1:]
    if placed is not None and isinstance(placed.value, list):
        index = _index(part, placed.value, done)
        items = list(placed.value)
        items[index] = _assign(items[index], rest, (*done, index), new)
        return replace(placed, value=items)
    is_mapping = placed is not None and isinstance(placed.value, dict)
    entries = dict(placed.value) if placed is not None and is_mapping else {}
    name = str(part)
    entries[name] = _assign(entries.get(name), rest, (*done, name), new)
    return Placed(value=entries, where=placed.where if placed is not None and is_mapping else new.where)


def _index(part: str | int, items: list[Placed], done: KeyPath) -> int:
    name = key_text(done)
    if not isinstance(part, int):
        raise _NoSuchItemError(f"`{name}` is a list; allowed: the number of an item, such as {name}[0]")
    if part >= len(items):
        allowed = f"0 to {len(items) - 1}" if items else "none, the list is empty"
        raise _NoSuchItemError(f"`{name}` has no item {part}; allowed: {allowed}")
    return part
