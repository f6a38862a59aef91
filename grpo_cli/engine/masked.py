"""Which completions of an optimizer step the rollout correction leaves out as a whole, or nearly so."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_cli.engine.distributed import Processes
from grpo_cli.metrics import Mean
from grpo_cli.objective.correction import CorrectionSettings, correction_weight, left_out
from grpo_cli.objective.ratio import rollout_ratio
from grpo_cli.objective.sequences import Sequences
from grpo_cli.types import TrainingGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Masked:
    """Completions, by what the rollout correction does to them.

    Attributes:
        lengths: Tokens of those that it leaves out of the policy term, on average.
        other_lengths: Tokens of those that keep a say in it.
    """

    lengths: Mean
    other_lengths: Mean

    def of_all(self, processes: Processes) -> "Masked":
        """Add those of the other processes."""
        own = [self.lengths.total, self.lengths.count, self.other_lengths.total, self.other_lengths.count]
        total, count, other_total, other_count = processes.sum(torch.tensor(own, dtype=torch.float64)).tolist()
        return Masked(lengths=Mean(total, count), other_lengths=Mean(other_total, other_count))


def masked_completions(
    groups: Sequence[TrainingGroup],
    active: Mapping[int, Sequence[int]],
    old: Sequence[tuple[Tensor, ...]],
    settings: CorrectionSettings,
) -> Masked:
    """Tell the completions of a step apart.

    Args:
        groups: Completions of the step.
        active: By the number of a group, which of it were computed; the others do not count, and neither do those masked from the loss.
        old: Per group G tensors, float32 [L], CPU: log-probabilities under the weights that sampled.
        settings: The correction.
    """
    lengths, others = Mean(0, 0), Mean(0, 0)
    for number, (group, logps) in enumerate(zip(groups, old, strict=True)):
        for index in (index for index in active.get(number, ()) if group.in_loss[index]):
            length = Mean(len(group.completion_ids[index]), 1)
            if _left_out(logps[index], group.behaviour_logps[index], settings):
                lengths = lengths.merge(length)
            else:
                others = others.merge(length)
    return Masked(lengths=lengths, other_lengths=others)


def _left_out(old: Tensor, behaviour: Tensor, settings: CorrectionSettings) -> bool:
    """Tell whether one completion of L tokens has no say."""
    alone = Sequences.count(torch.zeros(len(old), dtype=torch.int64), number=1, dtype=old.dtype)
    weight = correction_weight(rollout_ratio(old, behaviour, alone, settings.level), settings)
    return bool(left_out(weight, alone).all())
