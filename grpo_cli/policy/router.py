"""The load-balancing loss of a mixture of experts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from grpo_cli.errors import ModelError


def expert_shares(router_logits: Sequence[Tensor], multiplicity: Tensor, *, experts_per_token: int) -> Tensor:
    """Compute which share of the tokens goes to each expert, over all layers at once.

    Args:
        router_logits: One float [T, E] per layer that has a router, before the softmax.
        multiplicity: int64 [T], how many sequences each token stands for; 0: padding.
        experts_per_token: Experts that each token goes to.

    Returns:
        float [E] that sums to `experts_per_token`; not differentiable.
    """
    logits = torch.stack([layer.detach().float() for layer in router_logits])
    chosen = one_hot(logits.topk(experts_per_token, dim=-1).indices, logits.shape[-1])
    return torch.einsum("ltke,t->e", chosen.to(logits.dtype), _weights(multiplicity)) / len(logits)


def load_balancing_loss(router_logits: Sequence[Tensor], multiplicity: Tensor, *, shares: Tensor) -> Tensor:
    """Compute how unevenly tokens are spread over experts: 1 for each chosen expert if they are spread evenly, more if not.

    The auxiliary loss of Switch Transformers (Fedus et al. 2021, eq. 4-6) over all layers at once, as transformers computes it. A
    prompt that is fed once for G completions counts G times, as it would in padded rows. With the shares of a whole step given,
    the loss is a mean over tokens, and micro-batches add up to it exactly.

    Args:
        router_logits: One float [T, E] per layer that has a router, before the softmax.
        multiplicity: int64 [T], how many sequences each token stands for; 0: padding.
        shares: float [E], from `expert_shares`.

    Returns:
        Scalar, differentiable.
    """
    logits = torch.stack([layer.float() for layer in router_logits])
    probabilities = torch.einsum("lte,t->e", logits.softmax(dim=-1), _weights(multiplicity)) / len(logits)
    return len(shares) * (shares * probabilities).sum()


def _weights(multiplicity: Tensor) -> Tensor:
    """Turn multiplicities into weights that sum to 1."""
    return (multiplicity / multiplicity.sum()).float()


def _experts(config: Any) -> int:
    """Count a mixture's experts."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((int(getattr(config, name)) for name in names if getattr(config, name, None) is not None), 0)


def router_coefficient(model: Any, wanted: float | None) -> float:
    """Decide the weight of the load-balancing loss.

    Args:
        model: A transformers model.
        wanted: The recipe's `grpo.router_aux_loss_coef`; None: what the model's configuration says.

    Returns:
        The coefficient; 0 for a model without routers.

    Raises:
        ModelError: If the recipe weights a loss that the model does not have.
    """
    config = model.config.get_text_config()
    # Some families can be built without experts, and then have the setting all the same.
    has_routers = hasattr(config, "output_router_logits") and _experts(config) > 1
    if wanted and not has_routers:
        raise ModelError(
            f"grpo.router_aux_loss_coef: found {wanted}, but {type(model).__name__} gives no router logits",
            hint="leave it out: it is for mixtures of experts",
        )
    if not has_routers:
        return 0.0
    return float(getattr(config, "router_aux_loss_coef", 0.0)) if wanted is None else wanted
