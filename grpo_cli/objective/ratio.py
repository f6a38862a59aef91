"""Importance ratios between the current policy and the one that sampled. K tokens of N sequences."""

from enum import StrEnum

import torch
from torch import Tensor

from grpo_cli.objective.sequences import Sequences

MAX_LOG_RATIO = 20.0
"""Log-ratios end here before they are exponentiated.

A ratio of e^20 = 4.9e8 lies far outside every clip range; without an end, float32 overflows at 88, and the product of an infinite
ratio with the zero gradient of its clipped branch is NaN. Beyond it the ratio is constant and has no gradient.
"""


class RatioLevel(StrEnum):
    """What a ratio belongs to."""

    TOKEN = "token"  # noqa: S105  a level, no password
    """One ratio per token (PPO, GRPO)."""
    SEQUENCE = "sequence"
    """One ratio per completion, shared by its tokens (GSPO)."""


def exp_bounded(log_ratio: Tensor) -> Tensor:
    """Exponentiate log-ratios of any shape, up to e^20; exact below."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def importance_ratio(log_ratio: Tensor, sequences: Sequences, level: RatioLevel) -> Tensor:
    """Ratio pi / pi_old of each token.

    At sequence level it is the geometric mean over the sequence, exp(1/|y| sum_t log pi(y_t)/pi_old(y_t)): GSPO, Zheng et al. 2025,
    arXiv:2507.18071, eq. 7.

    Args:
        log_ratio: float [K], log pi - log pi_old.
        sequences: Where the K tokens belong.
        level: Token or sequence.

    Returns:
        float [K], differentiable; equal for all tokens of a sequence at sequence level.
    """
    if level == RatioLevel.SEQUENCE:
        log_ratio = sequences.spread(sequences.mean(log_ratio))
    return exp_bounded(log_ratio)


def rollout_ratio(old: Tensor, behaviour: Tensor, sequences: Sequences, level: RatioLevel) -> Tensor:
    """Ratio pi_old / pi_behaviour between the trainer's numbers and the rollout engine's, for the same weights.

    At sequence level it is the probability ratio of the whole sequence: the product over its tokens, not their geometric mean.

    Args:
        old: float [K], log-probabilities under the weights that sampled, by the trainer.
        behaviour: float [K], by the rollout engine. NaN where the engine could not tell: such a token counts as ratio 1.
        sequences: Where the K tokens belong.
        level: Token or sequence.

    Returns:
        float [K], without gradient.
    """
    with torch.no_grad():
        log_ratio = (old - behaviour).masked_fill(behaviour.isnan(), 0.0)
        if level == RatioLevel.SEQUENCE:
            log_ratio = sequences.spread(sequences.sum(log_ratio))
        return exp_bounded(log_ratio)
