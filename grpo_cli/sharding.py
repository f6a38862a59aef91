"""Parameters that are cut into parts, of which a process keeps one."""

import torch
from torch import Tensor


def whole_shape(parameter: Tensor) -> torch.Size:
    """Give the shape that a parameter has when it is whole. What DeepSpeed has cut shows an empty tensor in between."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def is_of_deepspeed(parameter: Tensor) -> bool:
    """Tell whether DeepSpeed cuts a parameter into parts, and brings it together where it is used."""
    return hasattr(parameter, "ds_shape")
