"""The distribution that tokens are sampled from, as one definition for both sides of the importance ratio.

The rollout engine draws from it, and the policy's forward takes log-probabilities under it: so top-k, top-p and min-p are
applied on both sides and the ratio of an unchanged policy is 1. The repetition penalty depends on everything sampled before
and exists only in the rollout engine; recipes with it are refused for training.
"""

import math

import torch
from torch import Tensor


def filter_logits(logits: Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Set the logits of tokens that are not kept to -inf.

    The filters are applied in the order top-k, top-p, min-p, each on the renormalised outcome of the one before. Ties with the
    last kept token are kept, so the outcome does not depend on how the device sorts. The likeliest token is always kept.

    Args:
        logits: float [..., V], already divided by the temperature.
        top_k: Tokens to keep; 0 keeps all.
        top_p: Smallest set of likeliest tokens with at least this mass (Holtzman et al. 2020); 1 keeps all.
        min_p: Tokens with at least this share of the likeliest token's probability (Nguyen et al. 2024); 0 keeps all.

    Returns:
        float [..., V]; differentiable with respect to the kept logits.
    """
    if 0 < top_k < logits.shape[-1]:
        smallest = logits.detach().topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits.detach() < smallest, -torch.inf)
    if top_p < 1.0:
        ordered = logits.detach().float().sort(dim=-1, descending=True).values
        probabilities = ordered.softmax(dim=-1)
        mass_before = probabilities.cumsum(dim=-1) - probabilities
        smallest = ordered.masked_fill(mass_before >= top_p, torch.inf).amin(dim=-1, keepdim=True)
        logits = logits.masked_fill(logits.detach().float() < smallest, -torch.inf)
    if min_p > 0.0:
        detached = logits.detach().float()
        smallest = detached.amax(dim=-1, keepdim=True) + math.log(min_p)
        logits = logits.masked_fill(detached < smallest, -torch.inf)
    return logits
