"""Metric values that can be added over micro-batches, ranks and steps, and become numbers once, at the end.

A ratio of sums is right where a mean of means is not: a micro-batch with few tokens must not weigh as much as a full one.
This module imports nothing heavy, so that the table of names can be shown without torch.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Sum:
    """A total, such as a number of tokens."""

    value: float

    def merge(self, other: Self) -> Self:
        """Add two totals."""
        return type(self)(self.value + other.value)

    def result(self) -> float:
        """Give the total."""
        return self.value


@dataclass(frozen=True, slots=True)
class Mean:
    """An average weighted by what it averages over: `total / count`.

    With count 0 the result is NaN: there was nothing to average.
    """

    total: float
    count: float

    def merge(self, other: Self) -> Self:
        """Pool the two averages."""
        return type(self)(self.total + other.total, self.count + other.count)

    def result(self) -> float:
        """Give the average, or NaN over nothing."""
        return self.total / self.count if self.count else math.nan


@dataclass(frozen=True, slots=True)
class Max:
    """A largest value; -inf is the largest of nothing and results in NaN."""

    value: float

    def merge(self, other: Self) -> Self:
        """Keep the larger."""
        return type(self)(max(self.value, other.value))

    def result(self) -> float:
        """Give the largest value, or NaN of nothing."""
        return math.nan if self.value == -math.inf else self.value


@dataclass(frozen=True, slots=True)
class Min:
    """A smallest value; +inf is the smallest of nothing and results in NaN."""

    value: float

    def merge(self, other: Self) -> Self:
        """Keep the smaller."""
        return type(self)(min(self.value, other.value))

    def result(self) -> float:
        """Give the smallest value, or NaN of nothing."""
        return math.nan if self.value == math.inf else self.value


MetricValue = Sum | Mean | Max | Min
Metrics = Mapping[str, MetricValue]
"""Metric name (as in the README's table) to a mergeable value."""


def merge(many: Iterable[Metrics]) -> dict[str, MetricValue]:
    """Merge metrics by name, in order of first appearance.

    Raises:
        TypeError: If one name comes with two kinds of value.
    """
    merged: dict[str, MetricValue] = {}
    for metrics in many:
        for name, value in metrics.items():
            before = merged.get(name)
            if before is None:
                merged[name] = value
                continue
            if type(before) is not type(value):
                raise TypeError(f"metric {name!r} is both {type(before).__name__} and {type(value).__name__}")
            merged[name] = before.merge(value)  # type: ignore[arg-type]  # the types were compared above
    return merged


def results(metrics: Metrics) -> dict[str, float]:
    """Turn mergeable values into numbers."""
    return {name: value.result() for name, value in metrics.items()}
