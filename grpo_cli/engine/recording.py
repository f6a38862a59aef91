"""Which completions the main process writes and shows."""

import math
from dataclasses import dataclass

from grpo_cli.recipe.schema import LoggingSection
from grpo_cli.telemetry.recorder import is_recorded


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
