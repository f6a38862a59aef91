"""Self-check at start: the fast forward must say what the model itself says."""

import torch

from grpo_cli.policy.forward import PolicyModel
from grpo_cli.types import Segment

TOLERANCE = 1e-3
"""Largest difference in a log-probability, in float32; bfloat16 gets the width of its rounding."""


def check_agreement(policy: PolicyModel, segments: tuple[Segment, ...]) -> str | None:
    """Compare the head-on-completions forward with the model's own logits, and fall back to those if they differ.

    Args:
        policy: Its `full_logits` is set to True when the two do not agree.
        segments: A few real prompts with a few tokens each.

    Returns:
        One line of notice when it fell back, else None.
    """
    if policy.full_logits:
        return None
    with torch.no_grad():
        fast = policy(segments).logps
        policy.full_logits = True
        plain = policy(segments).logps
    difference = (fast - plain).abs().max().item()
    reduced = next(policy.parameters()).dtype != torch.float32 or torch.is_autocast_enabled(plain.device.type)
    if difference <= (0.1 if reduced else TOLERANCE):
        policy.full_logits = False
        return None
    kind = type(policy.model).__name__
    return (
        f"{kind} does something to its logits that the chunked head does not know (log-probabilities differ by {difference:.2g}): "
        "using the model's full logits, which needs more memory"
    )
