"""From the recipe's `rewards:` to callables."""

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from grpo_cli.errors import RewardError
from grpo_cli.recipe.imports import resolve
from grpo_cli.recipe.schema import RewardFunction, RewardsSection
from grpo_cli.recipe.suggest import did_you_mean
from grpo_cli.scoring.contract import RESERVED_COLUMNS
from grpo_cli.scoring.reward import Reward, make_reward, signature_of
from grpo_cli.scoring.reward_model import load_reward_model


def load_rewards(
    section: RewardsSection, *, folder: Path, device: torch.device | str, trust_remote_code: bool = False
) -> tuple[Reward, ...]:
    """Import the functions, construct the classes and load the models that a recipe names as rewards.

    Args:
        section: The recipe's `rewards:`.
        folder: The recipe's folder, which dotted paths and relative model paths start from.
        device: Where reward models run.
        trust_remote_code: Whether a hub reward model may bring its own code.

    Raises:
        RewardError: If one cannot be called or constructed with the recipe's parameters.
        ModelError: If a reward model does not load.
    """
    return tuple(
        _load(entry, folder=folder, device=device, trust_remote_code=trust_remote_code)
        for entry in section.reward_funcs
    )


def _load(entry: RewardFunction, *, folder: Path, device: torch.device | str, trust_remote_code: bool) -> Reward:
    if entry.path is not None and entry.model is None:
        target = resolve(entry.path, folder)
        name = entry.name or _default_name(target, entry.path)
        return make_reward(name, _with_parameters(name, target, entry.parameters))
    if entry.model is not None and entry.path is None:
        model = load_reward_model(
            entry.model,
            folder=folder,
            device=device,
            batch_size=entry.batch_size,
            max_length=entry.max_length,
            trust_remote_code=trust_remote_code,
        )
        return make_reward(entry.name or entry.model.rstrip("/").rsplit("/", 1)[-1], model)
    raise RewardError("rewards.reward_funcs: a reward has either `path` or `model`")


def _default_name(target: Any, path: str) -> str:
    """Name a callable object by its own `__name__`, anything else by the last part of its path."""
    own = getattr(target, "__dict__", {}).get("__name__") if not inspect.isroutine(target) else None
    return own if isinstance(own, str) else path.rsplit(".", 1)[-1].rsplit(":", 1)[-1]


def _with_parameters(name: str, target: Any, parameters: Mapping[str, Any]) -> Callable[..., Any]:
    """Construct a class, bind a function's keyword arguments."""
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
