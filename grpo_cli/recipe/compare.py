"""Two recipes as plain values: what changed between them?"""

from collections.abc import Mapping
from typing import Any


def changed_keys(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """List the keys that have another value.

    Args:
        before: Nested mappings, as from `dataclasses.asdict`.
        after: The same.

    Returns:
        Dotted key to the value before and after, in the order of `before`, then of `after`. Lists are compared as a whole; so is a
        section that is null on one side. A key that is not there counts as null.
    """
    changes: dict[str, tuple[Any, Any]] = {}
    for key in dict.fromkeys((*before, *after)):
        old, new = before.get(key), after.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            changes |= {f"{key}.{inner}": change for inner, change in changed_keys(old, new).items()}
        elif old != new:
            changes[str(key)] = (old, new)
    return changes
