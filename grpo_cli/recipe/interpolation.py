"""`${...}` in a recipe, resolved by OmegaConf; what cannot be resolved becomes a problem at its line."""

import re
from dataclasses import replace
from typing import Any

from omegaconf import Container, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_cli.errors import Problem
from grpo_cli.recipe.position import KeyPath, Placed, key_text, leaves, place
from grpo_cli.recipe.schema import Recipe

_START = "${"


def resolve_interpolations(root: Placed, problems: list[Problem]) -> Placed:
    """Replace every `${key}` by what it stands for, the schema's defaults included; escaped ones lose their backslash.

    Args:
        root: The merged recipe.
        problems: Gets references to nothing; their value becomes None, and its key is in the problem.
    """
    references = {path: leaf for path, leaf in leaves(root) if isinstance(leaf.value, str) and _START in leaf.value}
    if not references:
        return root
    for path, leaf in references.items():
        try:
            OmegaConf.create({"value": leaf.value})
        except OmegaConfBaseException as error:
            problems.append(_problem(path, leaf, error))
            root = _replaced(root, path, None)
    defaults = OmegaConf.create(OmegaConf.to_container(OmegaConf.structured(Recipe)))
    config = OmegaConf.merge(defaults, OmegaConf.create(root.plain()))
    blamed = {problem.key for problem in problems}
    resolved = root
    for path, leaf in references.items():
        if key_text(path) in blamed:
            continue
        try:
            value = _value_at(config, path)
        except OmegaConfBaseException as error:
            problems.append(_problem(path, leaf, error))
            value = None
        resolved = _replaced(resolved, path, value)
    return resolved


def escape(value: Any) -> Any:
    """Write strings so that OmegaConf reads back exactly them, `${` included."""
    if isinstance(value, dict):
        return {key: escape(child) for key, child in value.items()}
    if isinstance(value, list):
        return [escape(child) for child in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", value)
    return value


def _value_at(config: Any, path: KeyPath) -> Any:
    for part in path:
        config = config[part]
    return OmegaConf.to_container(config, resolve=True) if isinstance(config, Container) else config


def _problem(path: KeyPath, leaf: Placed, error: OmegaConfBaseException) -> Problem:
    reason = str(error.msg or error).splitlines()[0]
    return Problem(
        where=leaf.where,
        key=key_text(path),
        message=f'cannot resolve "{leaf.value}": {reason}',
        hint=r"write \${ for the characters themselves",
    )


def _replaced(placed: Placed, path: KeyPath, value: Any) -> Placed:
    """Give a copy with the value at one leaf, or a tree of values, replaced."""
    if not path:
        return place(value, placed.where)
    children = dict(placed.value) if isinstance(placed.value, dict) else list(placed.value)
    children[path[0]] = _replaced(children[path[0]], path[1:], value)  # type: ignore[index]  # a path leads through either
    return replace(placed, value=children)
