"""A recipe file and the files that it `extends`, merged."""

import os
from dataclasses import replace
from pathlib import Path

from grpo_cli.errors import Problem
from grpo_cli.recipe.document import read_yaml
from grpo_cli.recipe.kinds import show
from grpo_cli.recipe.position import Placed, merge
from grpo_cli.recipe.suggest import did_you_mean

_EXTENDS = "extends"


def read_layers(path: Path, problems: list[Problem]) -> Placed | None:
    """Read a recipe with everything that it extends: a later file in the list wins over an earlier one, the recipe over all.

    Args:
        path: The recipe.
        problems: Gets what is wrong.

    Returns:
        The merged values; None if a file could not be read or is no YAML mapping, which makes looking further pointless.
    """
    if not path.is_file():
        problems.append(_missing(path, where=str(path), key=""))
        return None
    return _read(path, (), problems)


def _read(path: Path, chain: tuple[Path, ...], problems: list[Problem]) -> Placed | None:
    top = _read_file(path, problems)
    if top is None:
        return None
    entries = dict(top.value)
    extends = entries.pop(_EXTENDS, None)
    layers = [] if extends is None else _bases(path, extends, (*chain, path), problems)
    layers.append(replace(top, value=entries))
    if any(layer is None for layer in layers):
        return None
    merged = Placed(value={}, where=top.where)
    for layer in layers:
        assert layer is not None
        merged = merge(merged, layer)
    return merged


def _bases(path: Path, extends: Placed, chain: tuple[Path, ...], problems: list[Problem]) -> list[Placed | None]:
    """Read the files that one file extends."""
    names = extends.value if isinstance(extends.value, list) else [extends]
    if not names or any(not isinstance(name.value, str) or not name.value for name in names):
        message = f"found {show(extends.plain())}; allowed: the path of a recipe, or a list of paths"
        problems.append(Problem(where=extends.where, key=_EXTENDS, message=message))
        return [None]
    return [_base(path, name, chain, problems) for name in names]


def _base(path: Path, name: Placed, chain: tuple[Path, ...], problems: list[Problem]) -> Placed | None:
    base = Path(os.path.normpath(path.parent / Path(name.value).expanduser()))
    if base.resolve() in [each.resolve() for each in chain]:
        circle = " -> ".join(str(each) for each in (*chain, base))
        problems.append(
            Problem(where=name.where, key=_EXTENDS, message=f"files extend each other in a circle: {circle}")
        )
        return None
    if not base.is_file():
        problems.append(_missing(base, where=name.where, key=_EXTENDS))
        return None
    return _read(base, chain, problems)


def _missing(path: Path, *, where: str, key: str) -> Problem:
    what = "is a folder" if path.is_dir() else "does not exist"
    message = f"{what}; allowed: a YAML file" if not key else f'found "{path}", which {what}; allowed: a YAML file'
    neighbours = sorted(each.name for each in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
    return Problem(where=where, key=key, message=message, hint=did_you_mean(path.name, neighbours))


def _read_file(path: Path, problems: list[Problem]) -> Placed | None:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        problems.append(Problem(where=str(path), key="", message=f"cannot be read: {error}"))
        return None
    placed = read_yaml(text, lambda line: f"{path}:{line}", problems)
    if placed is None or isinstance(placed.value, dict):
        return placed
    message = f"found {show(placed.plain())}; allowed: a mapping of sections, such as `train:`"
    problems.append(Problem(where=placed.where, key="", message=message))
    return None
