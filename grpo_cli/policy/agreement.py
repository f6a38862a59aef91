"""Self-check at start: the fast ways to compute log-probabilities say what the model itself says.

The model itself is the padded row with the model's own logits. Compared with it, one after the other: another call, the head
applied to completion positions only, and prompts that are fed once for all their completions; of the last, the gradient too.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grpo_cli.device_memory import is_out_of_memory
from grpo_cli.errors import ModelError
from grpo_cli.policy.forward import PolicyModel
from grpo_cli.types import Segment, TokenStats

TOLERANCE = 1e-3
"""Largest difference in a log-probability, and largest relative difference of the gradient, in float32; bfloat16 gets the width
of its rounding."""


def choose_forward(policy: PolicyModel, segments: tuple[Segment, ...], *, share_prefix: bool = True) -> list[str]:
    """Let the policy compute in the fastest way that agrees with the model itself.

    Args:
        policy: Its `full_logits` and `shares_prefix` are set.
        segments: Real prompts with a few tokens each; at least one with two completions.
        share_prefix: Whether a prompt may be fed once for its completions.

    Returns:
        One line of notice for each fast way that does not work with this model.

    Raises:
        ModelError: If two calls on the same tokens differ, or what the model gives is not a number.
    """
    kind = type(policy.model).__name__
    device = next(policy.parameters()).device.type
    reduced = next(policy.parameters()).dtype != torch.float32 or torch.is_autocast_enabled(device)
    limit = 0.1 if reduced else TOLERANCE
    with _whole_distribution(policy):
        policy.full_logits = True
        plain = _log_probabilities(policy, segments)
        if plain.isnan().any():
            raise ModelError(
                f"model: {kind} gives log-probabilities that are not numbers (NaN)",
                hint="are its weights complete? try model.dtype: float32 or another model.attn_implementation",
            )
        noise = _difference(plain, _log_probabilities(policy, segments))
        if not noise <= limit:
            raise ModelError(
                f"model: {kind} is not deterministic in training mode: "
                f"the log-probabilities of the same tokens differ by {noise:.2g} between two calls",
                hint="set what is random in its forward (dropout, skipped layers, router noise) to 0 in its config.json",
            )
        policy.full_logits = False
        try:
            difference = _difference(plain, _log_probabilities(policy, segments))
        except (AttributeError, TypeError, RuntimeError) as error:  # a model without the usual decoder and head
            if is_out_of_memory(error):
                raise
            difference = math.inf
        if difference > limit:
            policy.full_logits = True
            notice = (
                f"{kind} does something to its logits that the chunked head does not know (log-probabilities differ by "
                f"{difference:.2g}): using the model's full logits in padded rows, which needs more memory and time"
            )
            return [notice]
        reason = _try_shared_prefix(policy, segments, plain, limit) if share_prefix else None
    return [] if reason is None else [f"{kind}: prompts are fed once per completion, in padded rows: {reason}"]


def _try_shared_prefix(policy: PolicyModel, segments: tuple[Segment, ...], plain: Tensor, limit: float) -> str | None:
    """Feed prompts once if that works; otherwise say why it does not."""
    plain_gradient = _gradient(policy, segments)
    try:
        policy.share_prefix()
    except ValueError as error:
        return " ".join(str(error).split())
    try:
        difference = _difference(plain, _log_probabilities(policy, segments))
        gradient = _gradient(policy, segments)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:  # a forward that takes no packed row
        if is_out_of_memory(error):
            raise
        policy.feed_prompts_apart()
        return f"it takes no packed row ({type(error).__name__})"
    if not difference <= limit:
        policy.feed_prompts_apart()
        return f"log-probabilities of a packed row differ by {difference:.2g}"
    difference = ((gradient - plain_gradient).norm() / plain_gradient.norm().clamp(min=1e-30)).item()
    if not difference <= limit:
        policy.feed_prompts_apart()
        return f"the gradient of a packed row differs by {difference:.2g}"
    return None


@contextmanager
def _whole_distribution(policy: PolicyModel) -> Iterator[None]:
    """Leave out filters and banned stop tokens: they turn rounding into jumps, and give -inf to probe tokens they exclude."""
    sampling = policy.sampling
    policy.sampling = replace(sampling, top_k=0, top_p=1.0, min_p=0.0, min_tokens=0)
    try:
        yield
    finally:
        policy.sampling = sampling


@torch.no_grad()
def _log_probabilities(policy: PolicyModel, segments: tuple[Segment, ...]) -> Tensor:
    stats: TokenStats = policy(segments)
    return stats.logps


def _gradient(policy: PolicyModel, segments: tuple[Segment, ...]) -> Tensor:
    """Gradient of a weighted sum of log-probabilities with respect to the first layer, which all other layers have a part in.

    That of all layers would be another copy of the model.
    """
    decoder: Any = policy.model.get_decoder()
    layers = getattr(decoder, "layers", None)
    trained = [value for value in (layers[0] if layers else decoder).parameters() if value.requires_grad]
    if not trained:
        return torch.zeros(1)
    with torch.enable_grad():
        logps = policy(segments).logps
        loss = (logps * torch.linspace(-1, 1, len(logps), device=logps.device)).sum()
        gradients = torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)
    return torch.cat([gradient.flatten().float() for gradient in gradients])


def _difference(one: Tensor, other: Tensor) -> float:
    """Largest difference; equal infinities do not differ, and NaN (in one of them) is larger than any limit."""
    return (one - other).abs().masked_fill(one == other, 0.0).nan_to_num(nan=torch.inf).max().item()
