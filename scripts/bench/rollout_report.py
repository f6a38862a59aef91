"""What the measurements of `scripts/bench/rollout` say: one table for each shape."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from bench.measure import Cost

BASELINE = "local"
MEBIBYTE = 2**20


@dataclass(frozen=True, kw_only=True)
class ShapeTurns:
    """Everything that was measured at one shape.

    Attributes:
        prompt_tokens: The shape's name.
        prompts: Number of prompts of a turn.
        completions: Number of completions of a turn.
        completion_length: Tokens of each.
        turns: By engine the answers of its process, one per turn.
    """

    prompt_tokens: int
    prompts: int
    completions: int
    completion_length: int
    turns: dict[str, list[dict[str, Any]]]


def median_cost(turns: Sequence[dict[str, Any]], *parts: str) -> Cost:
    """Give the medians, over turns, of the processor and of the wall time of some parts together."""
    costs = [sum((Cost(**turn["parts"][part]) for part in parts), Cost()) for turn in turns]
    return Cost(
        cpu_seconds=statistics.median(cost.cpu_seconds for cost in costs),
        wall_seconds=statistics.median(cost.wall_seconds for cost in costs),
    )


def rollout_table(result: ShapeTurns) -> Table:
    """Draw the table of a shape. In a pair the first number is by processor time, the second by wall time."""
    table = Table(
        title=f"prompts of about {result.prompt_tokens} tokens: {result.prompts} prompts, {result.completions} completions "
        f"of {result.completion_length} tokens",
        caption=_caption(result),
        title_justify="left",
        caption_justify="left",
    )
    for column in (
        "",
        "sampling, s",
        "completions/s",
        "tokens/s",
        f"times {BASELINE}",
        "sync, s",
        "sync, MiB",
        "sync and sampling, s",
        f"times {BASELINE}",
    ):
        table.add_column(column, justify="left" if not column else "right")
    baseline = result.turns[BASELINE]
    for engine, turns in result.turns.items():
        sampling, sync, both = (
            median_cost(turns, *parts) for parts in (("generate",), ("sync",), ("sync", "generate"))
        )
        table.add_row(
            engine,
            _pair(sampling.cpu_seconds, sampling.wall_seconds),
            _rate(result.completions, sampling),
            _rate(result.completions * result.completion_length, sampling),
            _times_faster(sampling, median_cost(baseline, "generate")),
            _pair(sync.cpu_seconds, sync.wall_seconds),
            f"{statistics.median(turn['sync_bytes'] for turn in turns) / MEBIBYTE:.0f}",
            _pair(both.cpu_seconds, both.wall_seconds),
            _times_faster(both, median_cost(baseline, "sync", "generate")),
        )
    return table


def _rate(count: int, cost: Cost) -> str:
    """Say how many there are per second."""
    return _pair(count / cost.cpu_seconds, count / cost.wall_seconds, digits=1)


def _times_faster(cost: Cost, baseline: Cost) -> str:
    """Say how many times faster than the baseline something is."""
    return _pair(baseline.cpu_seconds / cost.cpu_seconds, baseline.wall_seconds / cost.wall_seconds)


def _pair(cpu: float, wall: float, *, digits: int = 2) -> str:
    """Write a number by processor and one by wall time."""
    return f"{cpu:.{digits}f} / {wall:.{digits}f}"


def _caption(result: ShapeTurns) -> str:
    """Say how to read the table, and how quiet the machine was."""
    costs = [Cost(**turn["parts"]["generate"]) for turn in result.turns[BASELINE]]
    spreads = [
        100 * (max(seconds) / min(seconds) - 1)
        for seconds in ([cost.cpu_seconds for cost in costs], [cost.wall_seconds for cost in costs])
    ]
    return (
        "By processor / wall time; processor time is that of all threads and, with a server, of its processes. Medians of "
        f"{', '.join(f'{len(turns)} ({engine})' for engine, turns in result.turns.items())} turns. Between the fastest and the slowest "
        f"turn of {BASELINE}: {_pair(*spreads, digits=0)} %."
    )
