"""From the recipe's `rewards:` to callables."""

from pathlib import Path
from typing import Any

import torch

from grpo_cli.errors import RewardError
from grpo_cli.recipe.imports import resolve
from grpo_cli.recipe.schema import RewardFunction, RewardsSection
from grpo_cli.scoring.binding import default_name, with_parameters
from grpo_cli.scoring.event_loop import EventLoop
from grpo_cli.scoring.isolation.function import Source, end_processes, isolated, refuse_several_at_once
from grpo_cli.scoring.isolation.worker import WorkerLimits
from grpo_cli.scoring.limits import CallLimits
from grpo_cli.scoring.reward import Reward, comes_with_state, has_state, is_async, make_reward
from grpo_cli.scoring.reward_model import load_reward_model

DEFAULT_TIMEOUT = 300.0
"""Seconds for a call of an isolated function."""

DEFAULT_MEMORY = 8.0
"""GiB of a process of one."""


def load_rewards(
    section: RewardsSection,
    *,
    folder: Path,
    device: torch.device | str,
    trust_remote_code: bool = False,
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
    loop = EventLoop()
    loaded: list[Reward] = []
    try:
        for entry in section.reward_funcs:
            if entry.model is None:
                loaded.append(_load_function(entry, folder=folder, loop=loop))
            else:
                loaded.append(_load_model(entry, folder=folder, device=device, trust_remote_code=trust_remote_code))
    except BaseException:
        end_processes(loaded)
        loop.close()
        raise
    return tuple(loaded)


def _load_model(entry: RewardFunction, *, folder: Path, device: torch.device | str, trust_remote_code: bool) -> Reward:
    if entry.path is not None or entry.model is None:
        raise RewardError("rewards.reward_funcs: a reward has either `path` or `model`")
    model = load_reward_model(
        entry.model,
        folder=folder,
        device=device,
        batch_size=entry.batch_size,
        max_length=entry.max_length,
        trust_remote_code=trust_remote_code,
    )
    name = entry.name or entry.model.rstrip("/").rsplit("/", 1)[-1]
    return make_reward(name, model, limits=_limits(entry))


def _load_function(entry: RewardFunction, *, folder: Path, loop: EventLoop) -> Reward:
    if entry.path is None:
        raise RewardError("rewards.reward_funcs: a reward has either `path` or `model`")
    # One that has to be isolated is not even imported here.
    target = None if entry.isolated else resolve(entry.path, folder)
    name = entry.name or default_name(target, entry.path)
    if target is None or _needs_isolation(entry, name, target):
        source = Source(name=name, path=entry.path, folder=str(folder.resolve()), parameters=dict(entry.parameters))
        limits = WorkerLimits(
            seconds=entry.timeout or DEFAULT_TIMEOUT, memory_bytes=(entry.memory_limit or DEFAULT_MEMORY) * 2**30
        )
        return isolated(source, worker=limits, limits=_limits(entry, timeout=None), loop=loop)
    reward = make_reward(
        name, with_parameters(name, target, entry.parameters), limits=_limits(entry, timeout=entry.timeout)
    )
    if has_state(reward.source):
        refuse_several_at_once(name, reward.limits)
    return reward


def _needs_isolation(entry: RewardFunction, name: str, target: Any) -> bool:
    """Tell whether a function has to be called in another process.

    Raises:
        RewardError: If it must not, but what else the recipe says needs it.
    """
    called = target.__call__ if isinstance(target, type) else target
    wanted = {
        "timeout": entry.timeout is not None,
        "concurrency": entry.concurrency > 1,
        "calls_per_minute": entry.calls_per_minute is not None,
    }
    needing = [key for key, is_wanted in wanted.items() if is_wanted and not is_async(called)]
    if needing and entry.isolated is False:
        raise RewardError(
            f"reward {name!r}: `{needing[0]}` has no hold on a plain function in the trainer's process; allowed with an `async def` or "
            "in a process of its own",
            hint="leave `isolated: false` out",
        )
    says_so = bool(getattr(target, "isolated", False))
    return entry.isolated is None and (bool(needing) or entry.memory_limit is not None or says_so)


def _limits(entry: RewardFunction, *, timeout: float | None = None) -> CallLimits:
    return CallLimits(
        per_prompt=entry.per_prompt,
        concurrency=entry.concurrency,
        calls_per_minute=entry.calls_per_minute,
        timeout=timeout,
        retries=entry.retries,
    )


def are_independent(section: RewardsSection, *, folder: Path) -> bool:
    """Tell whether all rewards of a recipe are known to be the same when each call is given some prompts only. None is constructed for that.

    Args:
        section: The recipe's `rewards:`.
        folder: The recipe's folder, which dotted paths start from.

    Raises:
        RecipeError: If a function cannot be imported.
    """
    return all(_is_independent(entry, folder) for entry in section.reward_funcs)


def _is_independent(entry: RewardFunction, folder: Path) -> bool:
    if entry.path is None:
        return entry.model is not None  # which looks at one completion at a time
    if entry.isolated:  # it is not imported
        return False
    target = resolve(entry.path, folder)
    says_so = getattr(target, "independent", False) is True
    # `functools.wraps` copies what the function inside says, and the one around it may do more.
    is_copied = getattr(getattr(target, "__wrapped__", None), "independent", False) is True
    return says_so and not is_copied and not comes_with_state(target)
