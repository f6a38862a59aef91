"""Which completions the main process writes and shows, and how what belongs to them comes there."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_cli.engine.collecting import brought
from grpo_cli.engine.distributed import Processes
from grpo_cli.engine.rewarding import Rewarded
from grpo_cli.recipe.schema import LoggingSection
from grpo_cli.telemetry.recorder import is_recorded
from grpo_cli.telemetry.records import Rollouts


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """What is recorded of a generation: its first groups, whole ones.

    Attributes:
        settings: Of the recipe.
        steps_per_window: Optimizer steps that train on a generation.
        num_generations: Completions of a group.
    """

    settings: LoggingSection
    steps_per_window: int
    num_generations: int

    def places(self, count: int, *, step: int) -> range:
        """Give the places of the groups, of so many, that are recorded of a generation after so many optimizer steps."""
        if not is_recorded(self.settings, self.steps_per_window, step):
            return range(0)
        most = self.settings.num_completions_to_log
        return range(count if most is None else min(count, math.ceil(most / self.num_generations)))


def recorded_rollouts(rewarded: Rewarded, own: Sequence[Tensor], processes: Processes) -> Rollouts:
    """Put the advantages of the groups that are recorded beside them, in the main process.

    Args:
        rewarded: Their rewards.
        own: The advantages of this process's groups, float32 [G] each.
        processes: The processes of this run.
    """
    values = torch.cat([torch.empty(0), *own[: rewarded.recorded_here]])
    told = brought(values.numpy().tobytes(), rewarded.holders, processes)
    sizes = [len(one.rewards) for one in rewarded.recorded]
    everyones = torch.frombuffer(bytearray(b"".join(told)), dtype=torch.float32) if any(told) else torch.empty(0)
    return Rollouts(scored=rewarded.recorded, advantages=torch.split(everyones, sizes) if sizes else ())
