"""The table of rewards: one column per function, and what becomes of a group on which a function fails."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from grpo_cli.errors import RewardError
from grpo_cli.metrics import Metrics, Sum, merge
from grpo_cli.scoring.call import Call, Outcome, raised
from grpo_cli.scoring.contract import TrainerState, check_metric_names
from grpo_cli.scoring.event_loop import EventLoop
from grpo_cli.scoring.reward import Reward
from grpo_cli.types import Group, ScoredGroup

Extras = dict[str, tuple[Any, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """What one reward function gave to every group.

    Attributes:
        name: The function's.
        rewards: Per group float32 [G], or why the group is dropped.
        extras: Per group what `log_extra` logged, each of length G.
        metrics: What `log_metric` logged, and `time/reward/{name}`.
        failure: What went wrong on all groups together, if the function was called again group by group.
    """

    name: str
    rewards: list[Tensor | RewardError]
    extras: list[Extras]
    metrics: Metrics
    failure: str | None = None


def strict_column(
    reward: Reward, call: Call, groups: Sequence[Group], trainer_state: TrainerState, loop: EventLoop
) -> Column:
    """Collect a call of all groups.

    Raises:
        RewardError: If the function raised or broke its contract on any of them. Where it raised, it is called once more on one
            completion after the other, to name the row: the run stops, so what else it does no longer matters.
    """
    try:
        outcome = call.outcome()
    except RewardError as error:
        found = _first_failing_row(reward, groups, trainer_state, loop) if error.__cause__ is not None else None
        raise (found or error) from (found or error).__cause__
    for rewards in outcome.rewards:
        if isinstance(rewards, RewardError):
            raise rewards
    return _column(reward.name, [outcome], [groups], call.seconds)


def lenient_column(
    reward: Reward, call: Call, groups: Sequence[Group], trainer_state: TrainerState, loop: EventLoop
) -> Column:
    """Collect a call of all groups; if it failed as a whole, call the function again group by group.

    Raises:
        RewardError: If the function logged a metric under a name that is not allowed: no prompt is to blame for that.
    """
    try:
        outcome = call.outcome()
    except RewardError as error:
        failure = error.message
    else:
        return _column(reward.name, [outcome], [groups], call.seconds)
    outcomes, parts, errors = [], [], {}
    seconds = call.seconds
    for index, group in enumerate(groups):
        again = Call(reward, [group], trainer_state, loop)
        try:
            outcomes.append(again.outcome())
            parts.append([group])
        except RewardError as error:
            errors[index] = error
        seconds += again.seconds
    column = _column(reward.name, outcomes, parts, seconds)
    rewards, extras = iter(column.rewards), iter(column.extras)
    failed = [index in errors for index in range(len(groups))]
    return replace(
        column,
        rewards=[errors[index] if bad else next(rewards) for index, bad in enumerate(failed)],
        extras=[{} if bad else next(extras) for bad in failed],
        failure=failure,
    )


def table_rows(columns: Sequence[Column], groups: Sequence[Group]) -> tuple[list[ScoredGroup], list[str]]:
    """Put the columns side by side.

    Returns:
        The scored groups, and one line for each that is dropped because a function failed on it, or for a function that failed
        on all groups together and on none alone.
    """
    names = _extra_names(columns)
    scored: list[ScoredGroup] = []
    problems: list[str] = []
    for index, group in enumerate(groups):
        size = len(group.completions)
        rewards = [column.rewards[index] for column in columns]
        errors = [reward for reward in rewards if isinstance(reward, RewardError)]
        problems += [f"prompt {group.prompt.uid} is left out: {error.message}" for error in errors[:1]]
        scored.append(
            ScoredGroup(
                group=group,
                rewards=_side_by_side(rewards) if not errors else torch.full((size, len(columns)), math.nan),
                extras={
                    shown: columns[owner].extras[index].get(name, (None,) * size)
                    for shown, (owner, name) in names.items()
                },
                dropped=bool(errors),
            )
        )
    problems += [
        f"called again prompt by prompt: {column.failure}"
        for column in columns
        if column.failure is not None and not any(isinstance(rewards, RewardError) for rewards in column.rewards)
    ]
    return scored, problems


def _side_by_side(rewards: Iterable[Tensor | RewardError]) -> Tensor:
    return torch.stack([reward for reward in rewards if isinstance(reward, Tensor)], dim=1)


def _extra_names(columns: Sequence[Column]) -> dict[str, tuple[int, str]]:
    """Name the extra columns; where two functions log one name, the later one's carries the function's name in front."""
    names: dict[str, tuple[int, str]] = {}
    for owner, column in enumerate(columns):
        for name in dict.fromkeys(name for extras in column.extras for name in extras):
            names[f"{column.name}/{name}" if name in names else name] = (owner, name)
    return names


def _column(name: str, outcomes: Sequence[Outcome], parts: Sequence[Sequence[Group]], seconds: float) -> Column:
    extras: list[Extras] = []
    for outcome, groups in zip(outcomes, parts, strict=True):
        start = 0
        for group in groups:
            end = start + len(group.completions)
            extras.append({column: values[start:end] for column, values in outcome.journal.columns.items()})
            start = end
    logged = merge(outcome.journal.metrics for outcome in outcomes)
    check_metric_names(name, logged)
    return Column(
        name=name,
        rewards=[rewards for outcome in outcomes for rewards in outcome.rewards],
        extras=extras,
        metrics={**logged, f"time/reward/{name}": Sum(seconds)},
    )


def _first_failing_row(
    reward: Reward, groups: Sequence[Group], trainer_state: TrainerState, loop: EventLoop
) -> RewardError | None:
    """Find the first completion that a function raises on, all alone; None if it needs company to raise."""
    for group in groups:
        for completion in group.completions:
            row = replace(group, completions=(completion,))
            try:
                Call(reward, [row], trainer_state, loop).outcome()
            except RewardError as error:
                cause = error.__cause__
                if cause is None:
                    continue
                where = f" for prompt {group.prompt.uid}, completion {completion.index}"
                named = raised(reward.name, cause, where)
                named.__cause__ = cause
                return named
    return None
