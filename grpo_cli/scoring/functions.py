"""From the recipe's `rewards:` to callables."""

import math
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
    sharing: int = 1,
) -> tuple[Reward, ...]:
    """Import the functions, construct the classes and load the models that a recipe names as rewards.

    Args:
        section: The recipe's `rewards:`.
        folder: The recipe's folder, which dotted paths and relative model paths start from.
        device: Where reward models run.
        trust_remote_code: Whether a hub reward model may bring its own code.
        sharing: Processes that load the same, whose calls together are to be within the recipe's limits: but that each makes one at a time,
            and begins one more after a pause.

    Raises:
        RewardError: If one cannot be called or constructed with the recipe's parameters.
        ModelError: If a reward model does not load.
    """
    loop = EventLoop()
    loaded: list[Reward] = []
    try:
        for entry in section.reward_funcs:
            if entry.model is None:
                loaded.append(_load_function(entry, folder=folder, loop=loop, sharing=sharing))
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


def _load_function(entry: RewardFunction, *, folder: Path, loop: EventLoop, sharing: int) -> Reward:
    if entry.path is None:
        raise RewardError("rewards.reward_funcs: a reward has either `path` or `model`")
    # One that has to be isolated is not even imported here.
    target = None if entry.isolated else resolve(entry.path, folder)
    name = entry.name or default_name(target, entry.path)
    if target is None or _needs_isolation(entry, name, target):
        source = Source(name=name, path=entry.path, folder=str(folder.resolve()), parameters=dict(entry.parameters))
        worker = WorkerLimits(
            seconds=entry.timeout or DEFAULT_TIMEOUT, memory_bytes=(entry.memory_limit or DEFAULT_MEMORY) * 2**30
        )
        return isolated(source, worker=worker, limits=_limits(entry, sharing=sharing), loop=loop)
    limits = _limits(entry, timeout=entry.timeout, sharing=sharing)
    reward = make_reward(name, with_parameters(name, target, entry.parameters), limits=limits)
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


def _limits(entry: RewardFunction, *, timeout: float | None = None, sharing: int = 1) -> CallLimits:
    return CallLimits(
        per_prompt=entry.per_prompt,
        concurrency=math.ceil(entry.concurrency / sharing),
        calls_per_minute=None if entry.calls_per_minute is None else entry.calls_per_minute / sharing,
        timeout=timeout,
        retries=entry.retries,
    )


def look_at_prompts_alone(section: RewardsSection, *, folder: Path) -> bool:
    """Tell whether all rewards of a recipe are known to be the same when each is given some prompts only. None is constructed for that.

    Args:
        section: The recipe's `rewards:`.
        folder: The recipe's folder, which dotted paths start from.

    Raises:
        RecipeError: If a function cannot be imported.
    """
    return all(entry.model is not None or _looks_at_prompts_alone(entry, folder) for entry in section.reward_funcs)


def _looks_at_prompts_alone(entry: RewardFunction, folder: Path) -> bool:
    if entry.path is None:
        return False
    if entry.isolated:  # it is not imported; what has a state is called once at a time
        return entry.per_prompt and entry.concurrency > 1
    target = resolve(entry.path, folder)
    says_so = entry.per_prompt or bool(getattr(target, "independent", False))
    return says_so and not comes_with_state(target)
