"""In what precision a model computes: how much two right ways to the same numbers may differ depends on it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


def computing_dtype(model: nn.Module) -> torch.dtype:
    """Give the least precise type that a model computes in: its weights', autocast's, or what quantized layers multiply in.

    Where torch may round the factors of float32 products, as with `TORCH_ALLOW_TF32_CUBLAS_OVERRIDE`, which NVIDIA's containers set, that
    is float16, whose steps are those of TF32.

    Args:
        model: One whose first floating-point weight has the precision of the others.
    """
    first = next(one for one in model.parameters() if one.is_floating_point())
    kinds = {first.dtype}
    if torch.is_autocast_enabled(first.device.type):
        kinds.add(torch.get_autocast_dtype(first.device.type))
    if first.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        kinds.add(torch.float16)
    asked = (getattr(layer, "compute_dtype", None) for layer in model.modules())  # bitsandbytes' name for it
    kinds |= {one for one in asked if isinstance(one, torch.dtype)}
    return max(kinds, key=lambda kind: torch.finfo(kind).eps)


def is_reduced(dtype: torch.dtype) -> bool:
    """Tell whether a type is less precise than float32."""
    return dtype.itemsize < torch.float32.itemsize


@contextmanager
def rounded_once(model: nn.Module) -> Iterator[None]:
    """Let an autocast that keeps rounded weights keep those of frozen ones, too. Gradients must be off.

    It keeps what wants a gradient alone, and would round everything else again at every token.
    """
    frozen = [one for one in model.parameters() if not one.requires_grad and one.is_leaf and one.dtype == torch.float32]
    for parameter in frozen:
        parameter.requires_grad = True
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad = False
