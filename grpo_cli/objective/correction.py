"""Rollout correction: weights for the mismatch between the rollout engine's probabilities and the trainer's.

The ratio rho = pi_old / pi_behaviour (see `ratio.rollout_ratio`) multiplies the policy term. Unbounded it would have a large
variance, so it is truncated (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training") or masked.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from grpo_cli.objective.ratio import RatioLevel
from grpo_cli.objective.sequences import Sequences

LEFT_OUT = 0.1
"""Mean weight below which a completion counts as left out: 0 where it is masked, next to 0 where a product of many ratios is small."""


class CorrectionMode(StrEnum):
    """What happens to a ratio outside its bounds."""

    TRUNCATE = "truncate"
    """It is moved to the bound."""
    MASK = "mask"
    """It becomes 0: the token (or sequence) takes no part in the policy term."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrectionSettings:
    """How rollout ratios are formed and bounded.

    Attributes:
        level: A ratio per token, or the product over the sequence for all its tokens.
        mode: Truncate or mask.
        clip_min: Lower bound; None for none.
        clip_max: Upper bound; None for none.
    """

    level: RatioLevel
    mode: CorrectionMode
    clip_min: float | None = None
    clip_max: float | None = 3.0


def outside_bounds(ratio: Tensor, settings: CorrectionSettings) -> Tensor:
    """Bool, shape of `ratio`: which ratios lie outside [clip_min, clip_max]."""
    lowest = -math.inf if settings.clip_min is None else settings.clip_min
    highest = math.inf if settings.clip_max is None else settings.clip_max
    return (ratio < lowest) | (ratio > highest)


def correction_weight(ratio: Tensor, settings: CorrectionSettings) -> Tensor:
    """Bound rollout ratios.

    Args:
        ratio: float [K], from `rollout_ratio` at `settings.level`.
        settings: Mode and bounds.

    Returns:
        float [K], without gradient: what the policy term is multiplied with.
    """
    if settings.mode == CorrectionMode.MASK:
        return ratio.masked_fill(outside_bounds(ratio, settings), 0.0)
    lowest = 0.0 if settings.clip_min is None else settings.clip_min
    return torch.clamp(ratio, min=lowest, max=settings.clip_max)


def left_out(weight: Tensor, sequences: Sequences) -> Tensor:
    """Bool [N]: which completions have no say in the policy term, or hardly any.

    Args:
        weight: float [K], from `correction_weight`.
        sequences: Where the K tokens belong.
    """
    return sequences.active & (sequences.mean(weight) < LEFT_OUT)
