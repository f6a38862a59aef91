"""How the latest generations were rewarded, for reward functions that go by it."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_cli.scoring.trainer_state import RecentRewards
from grpo_cli.types import ScoredGroup

GENERATIONS = 10
"""That are remembered."""


class RewardMemory:
    """Remembers the rewards of the last generations, per function as count, sum and sum of squares.

    Args:
        names: The reward functions' names [F].
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._generations: deque[dict[str, tuple[float, float, float]]] = deque(maxlen=GENERATIONS)

    def sums(self, scored: Sequence[ScoredGroup]) -> Tensor:
        """Sum up the rewards of some groups; what stands in the place of a failure is left out.

        Returns:
            float64 [F, 3]: count, sum and sum of squares, which can be added to those of other groups.
        """
        sums = torch.zeros(len(self._names), 3, dtype=torch.float64)
        for number, name in enumerate(self._names):
            columns = [one.rewards[:, number] for one in scored if name not in one.failed]
            applied = torch.cat([torch.empty(0), *columns]).double()
            applied = applied[~applied.isnan()]
            sums[number] = torch.stack([torch.tensor(float(len(applied))), applied.sum(), applied.square().sum()])
        return sums

    def observe(self, sums: Tensor) -> None:
        """Take in the sums of a generation."""
        self._generations.append(dict(zip(self._names, map(tuple, sums.tolist()), strict=True)))

    def recent(self) -> dict[str, RecentRewards]:
        """Give what there is to tell; functions that applied to nothing are left out."""
        told = {}
        for name in self._names:
            seen = [generation[name] for generation in self._generations if name in generation]
            count, total, squares = (sum(column) for column in zip((0.0, 0.0, 0.0), *seen, strict=True))
            if count:
                mean = total / count
                deviation = math.sqrt(max(squares / count - mean**2, 0.0))
                told[name] = RecentRewards(mean=mean, std=deviation, count=round(count))
        return told

    def state_dict(self) -> dict[str, Any]:
        """Give what is remembered, as JSON."""
        return {"generations": [{name: list(seen) for name, seen in one.items()} for one in self._generations]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it. Functions that the run no longer has are never asked for."""
        generations = [{name: tuple(seen) for name, seen in one.items()} for one in state["generations"]]
        self._generations = deque(generations, maxlen=GENERATIONS)
