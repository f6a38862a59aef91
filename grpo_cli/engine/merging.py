"""Metrics as numbers that processes can add up, so that merging them takes no longer with more processes."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from grpo_cli.metrics import Max, Mean, Metrics, MetricValue, Min, Sum

Kinds = Mapping[str, str]
"""Metric name to its kind of value, such as `Mean`; in the order of the numbers."""


def kinds_of(metrics: Metrics) -> dict[str, str]:
    """Name the kinds of values."""
    return {name: type(value).__name__ for name, value in metrics.items()}


def with_kinds(known: Kinds, more: Kinds) -> dict[str, str]:
    """Add the kinds of another process.

    Raises:
        TypeError: If one name has two.
    """
    for name, kind in more.items():
        if known.get(name, kind) != kind:
            raise TypeError(f"metric {name!r} is both {known[name]} and {kind}")
    return {**known, **more}


def to_numbers(metrics: Metrics, kinds: Kinds) -> tuple[Tensor, Tensor]:
    """Write metrics as numbers [M], in the order of all names that there are.

    Args:
        metrics: Of this process.
        kinds: Of M metrics, those of this process among them.

    Returns:
        float64 [M, 3] to add up: how many processes have the metric, and what it is a sum of; and float64 [M] of which the largest counts.
    """
    sums = torch.zeros(len(kinds), 3, dtype=torch.float64)
    extremes = torch.full((len(kinds),), -math.inf, dtype=torch.float64)
    for row, name in enumerate(kinds):
        match metrics.get(name):
            case Sum(value):
                sums[row] = torch.tensor([1, value, 0])
            case Mean(total, count):
                sums[row] = torch.tensor([1, total, count])
            case Max(value):
                sums[row, 0], extremes[row] = 1, value
            case Min(value):
                sums[row, 0], extremes[row] = 1, -value
    return sums, extremes


def from_numbers(sums: Tensor, extremes: Tensor, kinds: Kinds) -> dict[str, MetricValue]:
    """Undo `to_numbers`, of all processes together; what none has is left out."""
    merged: dict[str, MetricValue] = {}
    for (name, kind), (present, total, count), extreme in zip(
        kinds.items(), sums.tolist(), extremes.tolist(), strict=True
    ):
        values: dict[str, MetricValue] = {
            "Sum": Sum(total),
            "Mean": Mean(total, count),
            "Max": Max(extreme),
            "Min": Min(-extreme),
        }
        if present:
            merged[name] = values[kind]
    return merged
