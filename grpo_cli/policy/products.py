"""The matrix products of a language-model head, summed in float32 or better whatever the precision of the factors.

Letters: c rows, H hidden size, V vocabulary.
"""

import torch
from torch import Tensor

from grpo_cli import onednn

ROWS_AT_ONCE = 4096


def sum_dtype(value: Tensor) -> torch.dtype:
    """Precision of logits, and of sums over tokens."""
    return torch.promote_types(value.dtype, torch.float32)


def operand_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Precision of the factors of matrix products.

    Only CUDA multiplies half-precision factors into float32 sums. Elsewhere they are converted first, which on most CPUs is
    faster besides.
    """
    device = hidden.device.type
    if device != "cuda":
        return sum_dtype(weight)
    return (
        torch.get_autocast_dtype(device)
        if torch.is_autocast_enabled(device)
        else torch.promote_types(hidden.dtype, weight.dtype)
    )


def project(rows: Tensor, weight: Tensor, bias: Tensor | None, *, out: Tensor) -> Tensor:
    """Write a linear layer's outputs for rows [c, H] into `out` [c, V], and return it."""
    if onednn.multiplies(rows, weight):
        out.copy_(onednn.product(rows, weight))
    elif rows.dtype == out.dtype:
        torch.mm(rows, weight.t(), out=out)
    else:
        torch.mm(rows, weight.t(), out_dtype=out.dtype, out=out)
    return out if bias is None else out.add_(bias)


def add_product(left: Tensor, right: Tensor, *, to: Tensor) -> None:
    """Add left @ right to a sum that may be of higher precision than they are."""
    by_onednn = onednn.multiplies(left, right)
    if left.dtype == to.dtype and not by_onednn:
        to.addmm_(left, right)
        return
    # oneDNN does not add to what is there, and addmm, before torch 2.10, not to a sum of another precision than its factors'. A whole
    # product beside the sum would be large.
    for start in range(0, len(left), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        rows = left[part]
        to[part].add_(onednn.product(rows, right.t()) if by_onednn else torch.mm(rows, right, out_dtype=to.dtype))
