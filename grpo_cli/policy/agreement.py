"""Self-check at start: the same tokens get the same log-probabilities, from call to call and from head to head."""

from dataclasses import replace

import torch
from torch import Tensor

from grpo_cli.errors import ModelError
from grpo_cli.policy.forward import PolicyModel
from grpo_cli.types import Segment, TokenStats

TOLERANCE = 1e-3
"""Largest difference in a log-probability, in float32; bfloat16 gets the width of its rounding."""


def check_agreement(policy: PolicyModel, segments: tuple[Segment, ...]) -> str | None:
    """Compare the head-on-completions forward with the model's own logits, and fall back to those if they differ.

    Args:
        policy: Its `full_logits` is set to True when the two do not agree.
        segments: A few real prompts with a few tokens each.

    Returns:
        One line of notice when it fell back, else None.

    Raises:
        ModelError: If two calls on the same tokens differ, or what the model gives is not a number.
    """
    kind = type(policy.model).__name__
    reduced = next(policy.parameters()).dtype != torch.float32 or torch.is_autocast_enabled(
        next(policy.parameters()).device.type
    )
    limit = 0.1 if reduced else TOLERANCE
    plain = _log_probabilities(policy, segments, full_logits=True)
    if plain.isnan().any():
        raise ModelError(
            f"model: {kind} gives log-probabilities that are not numbers (NaN)",
            hint="are its weights complete? try model.dtype: float32 or another model.attn_implementation",
        )
    noise = _difference(plain, _log_probabilities(policy, segments, full_logits=True))
    if not noise <= limit:
        raise ModelError(
            f"model: {kind} is not deterministic in training mode: "
            f"the log-probabilities of the same tokens differ by {noise:.2g} between two calls",
            hint="set what is random in its forward (dropout, skipped layers, router noise) to 0 in its config.json",
        )
    if policy.full_logits:
        return None
    difference = _difference(plain, _log_probabilities(policy, segments, full_logits=False))
    if difference <= limit:
        return None
    policy.full_logits = True
    return (
        f"{kind} does something to its logits that the chunked head does not know (log-probabilities differ by {difference:.2g}): "
        "using the model's full logits, which needs more memory"
    )


def _log_probabilities(policy: PolicyModel, segments: tuple[Segment, ...], *, full_logits: bool) -> Tensor:
    """Compute log-probabilities [C] one way, under the whole distribution.

    Filters and banned stop tokens are left out: they turn rounding into jumps, and give -inf to probe tokens they exclude.
    """
    sampling, chosen = policy.sampling, policy.full_logits
    policy.sampling = replace(sampling, top_k=0, top_p=1.0, min_p=0.0, min_tokens=0)
    policy.full_logits = full_logits
    try:
        with torch.no_grad():
            stats: TokenStats = policy(segments)
            return stats.logps
    finally:
        policy.sampling, policy.full_logits = sampling, chosen


def _difference(one: Tensor, other: Tensor) -> float:
    """Largest difference; equal infinities do not differ, and NaN (in one of them) is larger than any limit."""
    return (one - other).abs().masked_fill(one == other, 0.0).nan_to_num(nan=torch.inf).max().item()
