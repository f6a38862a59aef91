"""The table of rewards: one column per function, and what becomes of a group on which a function fails."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from grpo_cli.errors import RewardError
from grpo_cli.metrics import Max, Mean, Metrics, MetricValue, Sum, merge
from grpo_cli.scoring.call import Call, Outcome, raised
from grpo_cli.scoring.contract import check_metric_names
from grpo_cli.scoring.event_loop import EventLoop
from grpo_cli.scoring.isolation.failures import LostCallError, TimedOutError
from grpo_cli.scoring.reward import Reward
from grpo_cli.scoring.trainer_state import TrainerState
from grpo_cli.types import Group, LoggedColumn, ScoredGroup

MOST_TIMEOUTS = 3
"""Calls of single groups that may take too long one after another; then the others are not tried any more."""

Extras = dict[str, tuple[Any, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """What one reward function gave to every group.

    Attributes:
        name: The function's.
        rewards: Per group float32 [G], or why the group is dropped.
        extras: Per group what `log_extra` logged, each of length G.
        metrics: What `log_metric` logged, and what the calls took.
        logged: The names of those that `log_metric` logged.
        failure: What went wrong on several groups together, if the function was called again group by group.
    """

    name: str
    rewards: list[Tensor | RewardError]
    extras: list[Extras]
    metrics: Metrics
    logged: frozenset[str] = frozenset()
    failure: str | None = None


def strict_column(reward: Reward, calls: Sequence[Call], trainer_state: TrainerState, loop: EventLoop) -> Column:
    """Collect the calls of a function.

    Raises:
        RewardError: If the function failed or broke its contract on any group. Where it raised, it is called once more on one
            completion after the other, to name the row: the run stops, so what else it does no longer matters.
    """
    finished = []
    for call in calls:
        try:
            outcome = call.outcome()
        except RewardError as error:
            found = _first_failing_row(reward, call.groups, trainer_state, loop) if _is_raised(error) else None
            raise (found or error) from (found or error).__cause__
        for rewards in outcome.rewards:
            if isinstance(rewards, RewardError):
                raise rewards
        finished.append((call, outcome))
    return _column(reward.name, finished)


def lenient_column(reward: Reward, calls: Sequence[Call], trainer_state: TrainerState, loop: EventLoop) -> Column:
    """Collect the calls of a function; one of several groups that failed as a whole is made again group by group.

    Raises:
        RewardError: If the function logged a metric under a name that is not allowed: no prompt is to blame for that.
    """
    column: Column | None = None
    for call in calls:
        try:
            outcome = call.outcome()
        except RewardError as error:
            part = _again(reward, call, error, trainer_state, loop)
        else:
            part = _column(reward.name, [(call, outcome)])
        column = part if column is None else _joined(column, part)
    assert column is not None, "there is a call wherever there is a group"
    return column


def _again(reward: Reward, call: Call, failure: RewardError, trainer_state: TrainerState, loop: EventLoop) -> Column:
    """Find the groups that a call failed on."""
    if len(call.groups) == 1:
        return _lost(call, failure)
    column = replace(_lost(call, failure), rewards=[], extras=[], failure=failure.message)
    timeouts = 0
    for index, group in enumerate(call.groups):
        again = Call(reward, [group], trainer_state, loop, repeats=False)
        try:
            outcome = again.outcome()
        except RewardError as error:
            part = _lost(again, error)
            timeouts = timeouts + 1 if isinstance(error.__cause__, TimedOutError) else 0
        else:
            part = _column(reward.name, [(again, outcome)])
            timeouts = 0
        column = _joined(column, part)
        if timeouts == MOST_TIMEOUTS:
            rest = len(call.groups) - index - 1
            return replace(column, rewards=[*column.rewards, *[failure] * rest], extras=[*column.extras, *[{}] * rest])
    return column


def _lost(call: Call, failure: RewardError) -> Column:
    """Give the group of a call that failed its error."""
    return Column(name=call.name, rewards=[failure], extras=[{}], metrics=_call_metrics(call.name, call))


def _joined(column: Column, other: Column) -> Column:
    """Put the groups of two parts of a column behind each other."""
    return Column(
        name=column.name,
        rewards=[*column.rewards, *other.rewards],
        extras=[*column.extras, *other.extras],
        metrics=merge([column.metrics, other.metrics]),
        logged=column.logged | other.logged,
        failure=column.failure or other.failure,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """All columns side by side.

    Attributes:
        groups: The scored groups.
        problems: One line for each prompt on which a function failed, or for a function that failed on several together and on none
            alone.
    """

    groups: tuple[ScoredGroup, ...]
    problems: tuple[str, ...]


def put_together(columns: Sequence[Column], groups: Sequence[Group], *, error_value: float | None) -> Table:
    """Put the columns side by side.

    Args:
        columns: One per function.
        groups: What they scored.
        error_value: The rewards of a group that a function failed on; None: the group is dropped.
    """
    scored: list[ScoredGroup] = []
    problems: list[str] = []
    for index, group in enumerate(groups):
        size = len(group.completions)
        rewards = [column.rewards[index] for column in columns]
        errors = {
            column.name: reward
            for column, reward in zip(columns, rewards, strict=True)
            if isinstance(reward, RewardError)
        }
        dropped = bool(errors) and error_value is None
        problems += [
            f"prompt {group.prompt.uid} {_consequence(error_value)}: {error.message}" for error in errors.values()
        ]
        scored.append(
            ScoredGroup(
                group=group,
                rewards=torch.full((size, len(columns)), math.nan)
                if dropped
                else _side_by_side(rewards, size, error_value),
                extras={
                    LoggedColumn(column.name, name): values
                    for column in columns
                    for name, values in column.extras[index].items()
                },
                dropped=dropped,
                failed=tuple(errors),
            )
        )
    problems += [
        f"called again prompt by prompt: {column.failure}"
        for column in columns
        if column.failure is not None and not any(isinstance(rewards, RewardError) for rewards in column.rewards)
    ]
    return Table(groups=tuple(scored), problems=tuple(problems))


def _consequence(error_value: float | None) -> str:
    return "is left out" if error_value is None or math.isnan(error_value) else f"gets {error_value:g}"


def _side_by_side(rewards: Iterable[Tensor | RewardError], size: int, error_value: float | None) -> Tensor:
    return torch.stack(
        [
            reward
            if isinstance(reward, Tensor)
            else torch.full((size,), math.nan if error_value is None else error_value)
            for reward in rewards
        ],
        dim=1,
    )


def _column(name: str, finished: Sequence[tuple[Call, Outcome]]) -> Column:
    extras: list[Extras] = []
    for call, outcome in finished:
        start = 0
        for group in call.groups:
            end = start + len(group.completions)
            extras.append({column: values[start:end] for column, values in outcome.journal.columns.items()})
            start = end
    logged = merge(outcome.journal.metrics for _, outcome in finished)
    check_metric_names(name, logged)
    return Column(
        name=name,
        rewards=[rewards for _, outcome in finished for rewards in outcome.rewards],
        extras=extras,
        metrics=merge([logged, *(_call_metrics(name, call) for call, _ in finished)]),
        logged=frozenset(logged),
    )


def _call_metrics(name: str, call: Call) -> Metrics:
    """Tell what a call took. What did not happen is not told."""
    metrics: dict[str, MetricValue] = {f"time/reward/{name}": Sum(call.seconds)}
    if call.attempts > 1:
        metrics[f"reward/{name}/repeated_calls"] = Sum(call.attempts - 1)
    if call.per_prompt:
        metrics[f"time/reward/{name}/mean"] = Mean(call.seconds, 1)
        metrics[f"time/reward/{name}/max"] = Max(call.seconds)
    return metrics


def _is_raised(error: RewardError) -> bool:
    """Tell whether a function raised, so that it will again; not if its process was lost, over whatever."""
    return error.__cause__ is not None and not isinstance(error.__cause__, LostCallError)


def _first_failing_row(
    reward: Reward, groups: Sequence[Group], trainer_state: TrainerState, loop: EventLoop
) -> RewardError | None:
    """Find the first completion that a function raises on, all alone; None if it needs company to raise."""
    for group in groups:
        for completion in group.completions:
            row = replace(group, completions=(completion,))
            try:
                Call(reward, [row], trainer_state, loop, repeats=False).outcome()
            except RewardError as error:
                cause = error.__cause__
                if cause is None:
                    continue
                where = f" for prompt {group.prompt.uid}, completion {completion.index}"
                named = raised(reward.name, cause, where)
                named.__cause__ = cause
                return named
    return None
