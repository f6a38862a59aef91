"""Which completions of an optimizer step the rollout correction leaves out as a whole, or nearly so."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_cli.objective.correction import CorrectionSettings, correction_weight, left_out
from grpo_cli.objective.ratio import rollout_ratio
from grpo_cli.objective.sequences import Sequences
from grpo_cli.types import TrainingGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Masked:
    """Tokens of completions, by what the rollout correction does to them.

    Attributes:
        lengths: Of those that it leaves out of the policy term.
        other_lengths: Of those that keep a say in it.
    """

    lengths: Sequence[int]
    other_lengths: Sequence[int]


def masked_completions(
    groups: Sequence[TrainingGroup],
    active: Sequence[Sequence[int]],
    old: Sequence[tuple[Tensor, ...]],
    settings: CorrectionSettings,
) -> Masked:
    """Tell the completions of a step apart.

    Args:
        groups: All completions of the step.
        active: Which of each group were computed; the others do not count, and neither do those masked from the loss.
        old: Per group G tensors, float32 [L], CPU: log-probabilities under the weights that sampled.
        settings: The correction.
    """
    lengths: list[int] = []
    others: list[int] = []
    for group, indices, logps in zip(groups, active, old, strict=True):
        for index in (index for index in indices if group.in_loss[index]):
            gone = _left_out(logps[index], group.behaviour_logps[index], settings)
            (lengths if gone else others).append(len(group.completion_ids[index]))
    return Masked(lengths=lengths, other_lengths=others)


def _left_out(old: Tensor, behaviour: Tensor, settings: CorrectionSettings) -> bool:
    """Tell whether one completion of L tokens has no say."""
    alone = Sequences.count(torch.zeros(len(old), dtype=torch.int64), number=1, dtype=old.dtype)
    weight = correction_weight(rollout_ratio(old, behaviour, alone, settings.level), settings)
    return bool(left_out(weight, alone).all())
