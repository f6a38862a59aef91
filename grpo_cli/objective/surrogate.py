"""Policy terms: per-token losses [K] whose gradient moves the policy. To be minimised.

Symbols: r importance ratio pi / pi_old, A advantage, log pi the current log-probability. All tensors are float [K] unless said
otherwise. `catalog` says which `loss_type` uses which.
"""

import math

import torch
from torch import Tensor

from grpo_cli.objective.ratio import MAX_LOG_RATIO
from grpo_cli.objective.sequences import Sequences

_LOG_SMALLEST_WEIGHT = math.log(1e-8)
_SMALLEST_DECAY = 1e-4


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, *, epsilon: float, epsilon_high: float, delta: float | None = None
) -> Tensor:
    """-min(min(r, delta) A, clip(r, 1 - epsilon, 1 + epsilon_high) A).

    Schulman et al. 2017, arXiv:1707.06347, eq. 7; a higher upper end: DAPO, Yu et al. 2025, arXiv:2503.14476; the two-sided clip, which
    bounds the loss where A is negative: INTELLECT-2, 2025, arXiv:2505.07291.

    Args:
        ratio: r, differentiable.
        advantages: A.
        epsilon: Lower clip range.
        epsilon_high: Upper clip range.
        delta: Bound of the ratio in the unclipped branch; None for none.
    """
    clipped = ratio.clamp(1.0 - epsilon, 1.0 + epsilon_high)
    unclipped = ratio if delta is None else ratio.clamp(max=delta)
    return -torch.minimum(unclipped * advantages, clipped * advantages)


def cispo_surrogate(ratio: Tensor, advantages: Tensor, logps: Tensor, *, ceiling: float) -> Tensor:
    """-sg(min(r, ceiling)) A log pi: the weight is clipped, never the gradient of a token.

    CISPO: MiniMax-M1, 2025, arXiv:2506.13585, eq. 4 and 5.

    Args:
        ratio: r; its gradient is stopped.
        advantages: A.
        logps: log pi, differentiable.
        ceiling: Largest weight (`epsilon_high`: the ratio itself, not its distance from 1).
    """
    return -ratio.detach().clamp(max=ceiling) * advantages * logps


def sapo_surrogate(ratio: Tensor, advantages: Tensor, *, temperature_pos: float, temperature_neg: float) -> Tensor:
    """-(4 / tau) sigmoid(tau (r - 1)) A: a smooth gate instead of a clip.

    SAPO: Gao et al. 2025, arXiv:2511.20347. Its gradient at r = 1 is that of r A.

    Args:
        ratio: r, differentiable.
        advantages: A.
        temperature_pos: tau where A > 0.
        temperature_neg: tau elsewhere.
    """
    temperature = _choose(advantages > 0, temperature_pos, temperature_neg, like=ratio)
    return -torch.sigmoid(temperature * (ratio - 1.0)) * 4.0 / temperature * advantages


def vespo_surrogate(weight: Tensor, advantages: Tensor, logps: Tensor) -> Tensor:
    """-phi A log pi with the weight phi of `gamma_weight`.

    VESPO: 2026, arXiv:2602.10693.

    Args:
        weight: phi, without gradient.
        advantages: A.
        logps: log pi, differentiable.
    """
    return -weight * advantages * logps


def gamma_weight(
    log_ratio: Tensor,
    advantages: Tensor,
    sequences: Sequences,
    *,
    correction: Tensor | None,
    k_pos: float,
    lambda_pos: float,
    k_neg: float,
    lambda_neg: float,
) -> Tensor:
    """phi(w) = w^k exp(lambda (1 - w)) of the sequence's whole importance weight w; phi(1) = 1.

    VESPO: 2026, arXiv:2602.10693. Computed in log space: token log-ratios are kept within 20 of 0, log w within [log 1e-8, 20].

    Args:
        log_ratio: float [K], log pi - log pi_old.
        advantages: A; its sign picks k and lambda.
        sequences: Where the K tokens belong.
        correction: Rollout-correction weights per token; they multiply into w. None for none.
        k_pos: k where A >= 0.
        lambda_pos: lambda where A >= 0.
        k_neg: k elsewhere.
        lambda_neg: lambda elsewhere.

    Returns:
        float [K], without gradient, equal for all tokens of a sequence.
    """
    with torch.no_grad():
        log_weight = sequences.sum(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
        if correction is not None:
            log_weight = log_weight + sequences.sum(correction.log().clamp(_LOG_SMALLEST_WEIGHT, MAX_LOG_RATIO))
        log_weight = sequences.spread(log_weight.clamp(_LOG_SMALLEST_WEIGHT, MAX_LOG_RATIO))
        positive = advantages >= 0
        shape = _choose(positive, k_pos, k_neg, like=log_weight)
        decay = _choose(positive, lambda_pos, lambda_neg, like=log_weight).clamp(min=_SMALLEST_DECAY)
        return (decay + shape * log_weight - decay * log_weight.exp()).exp()


def _choose(condition: Tensor, yes: float, no: float, *, like: Tensor) -> Tensor:
    """`torch.where` of two numbers in the precision of `like`, where torch itself would round them to float32."""
    return torch.full_like(like, no).masked_fill(condition, yes)
