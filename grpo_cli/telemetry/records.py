"""What the trainer hands over to be recorded, besides the `StepReport`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from torch import Tensor

from grpo_cli.types import ScoredGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollouts:
    """What a step generated; a step that trains on older completions has none.

    Attributes:
        scored: The groups.
        advantages: One tensor per group, float32 [G].
    """

    scored: Sequence[ScoredGroup]
    advantages: Sequence[Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The outcome of one evaluation.

    Attributes:
        step: Optimizer steps done when it was made; 0 before the first.
        metrics: Numbers by name, `eval/` in front.
        tables: Every completion, by dataset; None stands for one that has no name.
    """

    step: int
    metrics: Mapping[str, float]
    tables: Mapping[str | None, pa.Table]
