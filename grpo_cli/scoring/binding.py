"""From a dotted path and parameters to a callable. Imports nothing heavy: worker processes do this, too."""

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from grpo_cli.errors import RewardError
from grpo_cli.recipe.imports import resolve
from grpo_cli.recipe.schema.rewards import RESERVED_COLUMNS
from grpo_cli.recipe.suggest import did_you_mean
from grpo_cli.scoring.reward import signature_of


def bound(name: str, path: str, *, folder: Path, parameters: Mapping[str, Any]) -> Callable[..., Any]:
    """Import what a path names, and construct the class or bind the function's arguments.

    Args:
        name: The reward's.
        path: Dotted.
        folder: The recipe's folder.
        parameters: The recipe's.

    Raises:
        RecipeError: If it is not there.
        RewardError: If it cannot be called or constructed with these parameters.
    """
    return with_parameters(name, resolve(path, folder), parameters)


def default_name(target: Any, path: str) -> str:
    """Name a callable object by its own `__name__`, anything else by the last part of its path."""
    own = getattr(target, "__dict__", {}).get("__name__") if not inspect.isroutine(target) else None
    return own if isinstance(own, str) else path.rsplit(".", 1)[-1].rsplit(":", 1)[-1]


def with_parameters(name: str, target: Any, parameters: Mapping[str, Any]) -> Callable[..., Any]:
    """Construct a class, bind a function's keyword arguments.

    Raises:
        RewardError: If it cannot be done.
    """
    if not callable(target):
        raise RewardError(
            f"reward {name!r} is of type {type(target).__name__}; allowed is a function, a class or a callable object"
        )
    _check_parameters(name, target, parameters)
    if not isinstance(target, type):
        return functools.partial(target, **parameters)
    try:
        instance: Any = target(**parameters)
    except Exception as error:
        raise RewardError(f"reward {name!r}: {target.__name__}(...) raised {type(error).__name__}: {error}") from error
    if not callable(instance):
        raise RewardError(f"reward {name!r}: objects of class {target.__name__} cannot be called; give it `__call__`")
    return functools.partial(instance)


def _check_parameters(name: str, target: Any, parameters: Mapping[str, Any]) -> None:
    """Refuse parameters that are not declared by name.

    `**kwargs` is there for the columns that a function does not use: a misspelled parameter must not vanish in it. Only where
    a callable declares nothing else are unknown names passed on.
    """
    signature = signature_of(name, target)
    declared = [
        parameter.name
        for parameter in signature.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.values())
    free = declared if isinstance(target, type) else [each for each in declared if each not in RESERVED_COLUMNS]
    for parameter in parameters:
        if parameter in free or (takes_any and not declared):
            continue
        if parameter in declared:
            raise RewardError(f"reward {name!r}: parameter {parameter!r} is given by the trainer, not by the recipe")
        raise RewardError(
            f"reward {name!r} has no parameter {parameter!r}; it has: {', '.join(free) or 'none'}",
            hint=did_you_mean(parameter, free),
        )
