"""Rewards of a few completions, for a person: a line each, and what each function came to."""

import math
from collections.abc import Iterator, Sequence
from statistics import fmean, stdev

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo_cli.metrics import Metrics
from grpo_cli.telemetry.logged_columns import shown_names
from grpo_cli.telemetry.names import find
from grpo_cli.telemetry.readable import duration, head_and_tail, short, visible
from grpo_cli.types import ScoredGroup

_CHARACTERS = 160
_NAME_CHARACTERS = 32


def print_reward_table(
    console: Console, scored: Sequence[ScoredGroup], names: Sequence[str], weights: Sequence[float], metrics: Metrics
) -> None:
    """Print the rewards of every completion, and a line for each function.

    Args:
        console: Where to.
        scored: The completions.
        names: One per function [F].
        weights: Theirs [F].
        metrics: What the calls took, as `time/reward/{name}` and so on.
    """
    console.print(_completions(scored, names, weights))
    console.print(_functions(scored, names, weights, metrics))
    for line in (*_logged_lines(scored, names), *_metric_lines(metrics)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _logged_lines(scored: Sequence[ScoredGroup], names: Sequence[str]) -> Iterator[str]:
    """Give what functions logged with `log_extra`, a line for each completion."""
    shown = shown_names(scored, names)
    for one in scored:
        row = one.group.prompt.uid.rpartition(":")[2]
        for completion in one.group.completions:
            logged = [
                f"{visible(shown[column])}: {head_and_tail(visible(str(values[completion.index])), _CHARACTERS)}"
                for column, values in one.extras.items()
                if values[completion.index] not in (None, "")
            ]
            if logged:
                yield f"row {row}, completion {completion.index}: {', '.join(logged)}"


def _metric_lines(metrics: Metrics) -> Iterator[str]:
    """Give what they logged with `log_metric`, which is no metric of a run's own."""
    logged = {name: value for name, value in metrics.items() if find(name) is None}
    if logged:
        yield ", ".join(f"{visible(name)} {short(value.result())}" for name, value in logged.items())


def _completions(scored: Sequence[ScoredGroup], names: Sequence[str], weights: Sequence[float]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, expand=True)
    table.add_column("prompt", no_wrap=True)
    table.add_column("completion", ratio=1, overflow="fold")
    for name in (*names, "reward"):
        table.add_column(visible(name), justify="right", overflow="fold")
    for one in scored:
        for completion, rewards in zip(one.group.completions, one.rewards.tolist(), strict=True):
            applied = [
                weight * reward for weight, reward in zip(weights, rewards, strict=True) if not math.isnan(reward)
            ]
            table.add_row(
                Text(f"row {one.group.prompt.uid.rpartition(':')[2]}" if completion.index == 0 else ""),
                Text(head_and_tail(visible(completion.text), _CHARACTERS)),
                *(
                    "failed" if name in one.failed else short(reward + 0.0)
                    for name, reward in zip(names, rewards, strict=True)
                ),
                short(math.fsum(applied) if applied else math.nan),
            )
    return table


def _functions(
    scored: Sequence[ScoredGroup], names: Sequence[str], weights: Sequence[float], metrics: Metrics
) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("function", min_width=min(max(map(len, names)), _NAME_CHARACTERS), overflow="fold")
    for title in ("weight", "mean", "std", "min", "max", "null", "time", "failed"):
        table.add_column(title, justify="right", no_wrap=True)
    for number, name in enumerate(names):
        column = [rewards[number] for one in scored if name not in one.failed for rewards in one.rewards.tolist()]
        values = [value + 0.0 for value in column if not math.isnan(value)]  # no minus before a 0
        table.add_row(
            Text(visible(name)),
            short(weights[number]),
            short(fmean(values) if values else math.nan),
            short(stdev(values) if len(values) > 1 else math.nan),
            short(min(values, default=math.nan)),
            short(max(values, default=math.nan)),
            str(len(column) - len(values)),
            duration(metrics[f"time/reward/{name}"].result()),
            str(sum(name in one.failed for one in scored)),
        )
    return table
