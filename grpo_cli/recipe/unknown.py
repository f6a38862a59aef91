"""Keys that the schema does not have, and where they probably belong."""

from collections.abc import Iterator
from functools import cache
from typing import Any

from grpo_cli.recipe.kinds import fields_of, is_section, types_of
from grpo_cli.recipe.position import KeyPath, key_text
from grpo_cli.recipe.schema import Recipe
from grpo_cli.recipe.suggest import did_you_mean, nearest, other_name


def unknown_key(section: KeyPath, key: Any, allowed: list[str]) -> tuple[str, str | None]:
    """Say what is wrong with a key, and what it should probably be.

    The guesses, in order: the beginning of a name in this section; the same name in another section; a name from other
    trainers; a name spelled alike in this section; a parameter of a reward function; a name spelled alike in another section.

    Args:
        section: Where the key stands.
        key: The key.
        allowed: The keys of that section.

    Returns:
        Message and hint.
    """
    name = f"`{key_text(section)}`" if section else "the recipe"
    message = f"unknown key; allowed in {name}: {', '.join(allowed)}"
    if not isinstance(key, str):
        return message, None
    places = _places()
    hint = (
        _as_hint(next((name for name in allowed if name.startswith(f"{key}_")), None))
        or _as_hint(places.get(key))
        or other_name(key)
        or did_you_mean(key, allowed)
        or _as_parameter(section, key)
        or _as_hint(places.get(nearest(key, places) or ""))
    )
    return message, hint


def _as_parameter(section: KeyPath, key: str) -> str | None:
    is_reward = section[-2:-1] == ("reward_funcs",)
    return f"a parameter of the function goes under `parameters: {{{key}: ...}}`" if is_reward else None


def _as_hint(key: str | None) -> str | None:
    return None if key is None else f"did you mean `{key}`?"


@cache
def _places() -> dict[str, str]:
    """Map the name of each key below the top level to its first dotted key."""
    places: dict[str, str] = {}
    for path in _keys(Recipe, ()):
        if len(path) > 1:
            places.setdefault(str(path[-1]), key_text(path))
    return places


def _keys(section: type[Any], path: KeyPath) -> Iterator[KeyPath]:
    kinds = types_of(section)
    for name in fields_of(section):
        yield (*path, name)
        if is_section(kinds[name]):
            yield from _keys(kinds[name], (*path, name))
