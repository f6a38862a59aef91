"""What a reward function logs while it scores: extra columns and metrics."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_cli.metrics import Mean


class Journal:
    """Takes the `log_extra` and `log_metric` calls of one call of one reward function.

    Args:
        count: Number of completions in the call.

    Attributes:
        columns: What `log_extra` logged, each of length `count`.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self.columns: dict[str, tuple[Any, ...]] = {}
        self._logged: dict[str, Mean] = {}

    @property
    def metrics(self) -> dict[str, Mean]:
        """What `log_metric` logged: the mean by name, which counts once for each completion of the call.

        So calls on few completions and on many together give the number that one call on all of them gives, where that is a mean over them.
        """
        return {
            name: Mean(logged.total * (self._count / logged.count), self._count)
            for name, logged in self._logged.items()
        }

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Add a column to the completion files.

        Raises:
            ValueError: If there is not one value per completion.
        """
        if len(values) != self._count:
            raise ValueError(f"log_extra({column!r}, ...) got {len(values)} values for {self._count} completions")
        self.columns[column] = tuple(values)

    def take(self, columns: Mapping[str, Sequence[Any]], metrics: Mapping[str, Mean]) -> None:
        """Take over what was logged in another process, where it was checked."""
        for column, values in columns.items():
            self.log_extra(column, values)
        self._logged |= metrics

    def log_metric(self, name: str, value: float) -> None:
        """Average a number into a metric.

        Raises:
            ValueError: If it is not finite: it would spoil the average.
        """
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"log_metric({name!r}, ...) got {number}; allowed is a finite number")
        logged = Mean(number, 1)
        self._logged[name] = self._logged[name].merge(logged) if name in self._logged else logged
