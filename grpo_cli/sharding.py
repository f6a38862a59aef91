"""Parameters that do not look like what they are: cut into parts, of which a process keeps one, or packed into few bits."""

import os

import torch
from torch import Tensor


def whole_shape(parameter: Tensor) -> torch.Size:
    """Give the shape that a parameter has when it is whole. What DeepSpeed has cut shows an empty tensor in between; 4-bit weights, bytes."""
    packed = getattr(parameter, "quant_state", None)
    if packed is not None:
        return torch.Size(packed.shape)
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def whole_bytes(parameter: Tensor) -> int:
    """Count the bytes that a parameter has when it is whole; of 4-bit weights, with their scales."""
    packed = getattr(parameter, "quant_state", None)
    if packed is not None:
        second = getattr(packed, "state2", None)  # of the scales, which may be rounded themselves
        return parameter.nbytes + int(packed.absmax.nbytes) + (0 if second is None else int(second.absmax.nbytes))
    return whole_shape(parameter).numel() * parameter.element_size()


def keep_deepspeed_quiet() -> None:
    """Tell DeepSpeed where there is no accelerator: it would warn of it whenever a library imports it, which they do wherever it is installed."""
    if not torch.accelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def is_of_deepspeed(parameter: Tensor) -> bool:
    """Tell whether DeepSpeed cuts a parameter into parts, and brings it together where it is used."""
    return hasattr(parameter, "ds_shape")
