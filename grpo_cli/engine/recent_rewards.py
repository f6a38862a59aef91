"""How the latest generations were rewarded, for reward functions that go by it."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

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
        self._generations: deque[list[list[float]]] = deque(maxlen=GENERATIONS)

    def observe(self, scored: Sequence[ScoredGroup]) -> None:
        """Take in a generation."""
        rewards = torch.cat([one.rewards for one in scored]).double()
        columns = [column[~column.isnan()] for column in rewards.unbind(dim=1)]
        self._generations.append([[len(one), one.sum().item(), one.square().sum().item()] for one in columns])

    def recent(self) -> dict[str, RecentRewards]:
        """Give what there is to tell; functions that applied to nothing are left out."""
        told = {}
        for number, name in enumerate(self._names):
            count, total, squares = (
                sum(generation[number][place] for generation in self._generations) for place in range(3)
            )
            if count:
                mean = total / count
                told[name] = RecentRewards(
                    mean=mean, std=math.sqrt(max(squares / count - mean**2, 0.0)), count=round(count)
                )
        return told

    def state_dict(self) -> dict[str, Any]:
        """Give what is remembered, as JSON."""
        return {"generations": list(self._generations)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it."""
        self._generations = deque(state["generations"], maxlen=GENERATIONS)
