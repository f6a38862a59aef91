"""The layers of a model, which are the same work over and over: what is checkpointed, or cut into parts, one by one."""

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


def layers_of(model: nn.Module) -> list[nn.Module]:
    """List a model's layers, whatever its family calls them; none if it is not made as transformers' models are."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
