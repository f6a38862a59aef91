"""What reward functions are told about the run."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class RecentRewards:
    """How the latest completions of training were rewarded by one function, where it applied.

    Attributes:
        mean: Of the completions of the last generations.
        std: Their standard deviation.
        count: How many they are.
    """

    mean: float
    std: float
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerState:
    """Where the run is, for rewards that change with it.

    Attributes:
        global_step: Optimizer steps done.
        max_steps: Optimizer steps of the whole run.
        epoch: Passes over the dataset, as a fraction.
        progress: `global_step / max_steps`, in 0..1.
        recent_rewards: By the name of a reward function, how it has rewarded the latest generations. Empty before the first one.
    """

    global_step: int
    max_steps: int
    epoch: float
    progress: float
    recent_rewards: Mapping[str, RecentRewards] = field(default_factory=dict)
