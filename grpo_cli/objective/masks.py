"""Which tokens take part in the policy term. K tokens of N sequences.

Truncated completions are no concern of this module: `TokenBatch.loss_mask` already leaves them out.
"""

import math

import torch
from torch import Tensor

from grpo_cli.objective.sequences import Sequences


def entropy_threshold(entropies: Tensor, loss_mask: Tensor, quantile: float) -> float:
    """Entropy at or above which a token belongs to the top `quantile` of a whole optimizer step.

    Wang et al. 2025, "Beyond the 80/20 rule", arXiv:2506.01939. Interpolates linearly, as `torch.quantile(..., 1 - quantile)` does,
    but for any number of tokens.

    Args:
        entropies: float, any shape: all tokens of the step, over all micro-batches and processes.
        loss_mask: bool, same shape: tokens that count.
        quantile: Share of tokens to keep, in (0, 1].

    Returns:
        The threshold; +inf if no token counts.
    """
    # On the CPU, because not every accelerator has float64.
    ordered = entropies.detach()[loss_mask].cpu().double().sort().values
    if ordered.numel() == 0:
        return math.inf
    position = (1.0 - quantile) * (ordered.numel() - 1)
    below = math.floor(position)
    above = min(below + 1, ordered.numel() - 1)
    low, high = ordered[below].item(), ordered[above].item()
    # In this form both ends are exact, so that a threshold that is some token's entropy keeps that token.
    return low + (position - below) * (high - low)


def high_entropy(entropies: Tensor, threshold: float) -> Tensor:
    """Bool [K]: tokens whose entropy [K] reaches the step's threshold."""
    return entropies.detach() >= threshold


def near_policy(
    logps: Tensor, behaviour: Tensor, advantages: Tensor, sequences: Sequences, *, threshold: float
) -> Tensor:
    """Tokens that off-policy sequence masking keeps.

    Drops a sequence when its advantage is negative and the mean of log pi_behaviour - log pi over it exceeds the threshold:
    DeepSeek-V3.2, 2025, arXiv:2512.02556, eq. 9.

    Args:
        logps: float [K], log pi.
        behaviour: float [K], log-probabilities when sampled. NaN (unknown) counts as no drift.
        advantages: float [K].
        sequences: Where the K tokens belong.
        threshold: Largest mean drift to keep.

    Returns:
        bool [K], equal for all tokens of a sequence.
    """
    with torch.no_grad():
        drift = (behaviour - logps).masked_fill(behaviour.isnan(), 0.0)
        return (advantages >= 0) | (sequences.spread(sequences.mean(drift)) <= threshold)
