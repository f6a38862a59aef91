"""The load-balancing loss of a mixture of experts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from grpo_cli.errors import ModelError


def load_balancing_loss(router_logits: Sequence[Tensor], multiplicity: Tensor, *, experts_per_token: int) -> Tensor:
    """Compute how unevenly tokens are spread over experts: 1 for each chosen expert if they are spread evenly, more if not.

    The auxiliary loss of Switch Transformers (Fedus et al. 2021, eq. 4-6) over all layers at once, as transformers computes it. A
    prompt that is fed once for G completions counts G times, as it would in padded rows.

    Args:
        router_logits: One float [T, E] per layer that has a router, before the softmax.
        multiplicity: int64 [T], how many sequences each token stands for; 0: padding.
        experts_per_token: Experts that each token goes to.

    Returns:
        Scalar, differentiable.
    """
    logits = torch.stack([layer.float() for layer in router_logits])
    weights = (multiplicity / multiplicity.sum()).to(logits.dtype)
    probabilities = logits.softmax(dim=-1)
    chosen = probabilities.topk(experts_per_token, dim=-1).indices
    experts = logits.shape[-1]
    token_shares = torch.einsum("ltke,t->e", one_hot(chosen, experts).to(logits.dtype), weights) / len(logits)
    probability_shares = torch.einsum("lte,t->e", probabilities, weights) / len(logits)
    return experts * (token_shares * probability_shares).sum()


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
    has_routers = hasattr(config, "output_router_logits")
    if wanted and not has_routers:
        raise ModelError(
            f"grpo.router_aux_loss_coef: found {wanted}, but {type(model).__name__} gives no router logits",
            hint="leave it out: it is for mixtures of experts",
        )
    if not has_routers:
        return 0.0
    return float(getattr(config, "router_aux_loss_coef", 0.0)) if wanted is None else wanted
