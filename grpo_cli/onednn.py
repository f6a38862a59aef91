"""Matrix products through oneDNN, on processors where PyTorch's BLAS leaves half of their speed unused.

PyTorch multiplies float32 matrices on x86 processors with Intel's MKL, which takes the narrower vector units on processors of other
makers. oneDNN, which PyTorch brings along, takes the widest: on an AMD processor with AVX-512 its products took 0.45 times as long
(PyTorch 2.13, MKL 2024.2, oneDNN 3.12). The sums are the same, in another order.

Letters: T rows, I inputs, O outputs.
"""

from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

PROCESSORS = Path("/proc/cpuinfo")


@cache
def is_faster() -> bool:
    """Tell whether this processor gains: an x86 processor with AVX-512 that is not Intel's.

    Decided by what the processor is and not by a measurement, so that two runs on one machine round alike.
    """
    if not torch._C._has_mkldnn or not PROCESSORS.is_file():  # noqa: SLF001  what torch.backends.mkldnn asks
        return False
    description = PROCESSORS.read_text(encoding="utf-8", errors="replace")
    return "AuthenticAMD" in description and "avx512f" in description


def multiplies(*operands: Tensor) -> bool:
    """Tell whether `product` is to be taken for these tensors: float32 on a processor that gains."""
    return (
        all(operand.dtype == torch.float32 and operand.device.type == "cpu" for operand in operands)
        and bool(torch.backends.mkldnn.enabled)
        and is_faster()
    )


def product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply.

    Args:
        rows: float32 [..., I], CPU.
        weight: float32 [O, I], with any strides.
        bias: float32 [O].

    Returns:
        float32 [..., O].
    """
    output: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")  # noqa: SLF001  torch has no public name
    return output


def speed_up_linears(model: Any) -> None:
    """Let a model's plain linear layers multiply by `product` from now on; gradients are taken as usual.

    Layers in another precision, on another device or of another make than `nn.Linear` stay as they are, and so does the head,
    whose products are the caller's.

    Args:
        model: A transformers model.
    """
    head = model.get_output_embeddings()
    heads = [] if head is None else list(head.modules())  # with adapters there may be a copy of it
    for layer in plain_linears(model):
        if not any(layer is one for one in heads):
            vars(layer)["forward"] = partial(_linear, layer)


def plain_linears(model: nn.Module) -> list[nn.Linear]:
    """List the linear layers that `product` can stand in for, those where it does so already included."""
    return [
        module
        for module in model.modules()
        if type(module) is nn.Linear and multiplies(module.weight) and not _is_replaced_by_others(module)
    ]


def _is_replaced_by_others(layer: nn.Linear) -> bool:
    """Tell whether somebody else, such as a sharding wrapper, has given a layer another forward."""
    forward = vars(layer).get("forward")
    return forward is not None and getattr(forward, "func", None) is not _linear


def _linear(layer: nn.Linear, rows: Tensor) -> Tensor:
    """Stand in for a linear layer's forward."""
    # oneDNN refuses what has no rows, such as the tokens of an expert that is chosen by none.
    usual = torch.is_autocast_enabled("cpu") or rows.ndim < 2 or not rows.numel()
    if usual or not multiplies(rows, layer.weight):
        return nn.functional.linear(rows, layer.weight, layer.bias)
    outcome: Tensor = _Linear.apply(rows, layer.weight, layer.bias)  # type: ignore[no-untyped-call]
    return outcome


class _Linear(torch.autograd.Function):
    """A linear layer whose three products are oneDNN's."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of_rows, of_weight, _ = ctx.needs_input_grad
        # A frozen weight does not need the rows: under LoRA nearly all of them.
        ctx.save_for_backward(rows if of_weight else None, weight if of_rows else None)
        return product(rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        of_rows, of_weight, of_bias = ctx.needs_input_grad
        flat = gradient.flatten(end_dim=-2)
        return (
            product(gradient, weight.t()) if of_rows else None,
            product(flat.t(), rows.flatten(end_dim=-2).t()) if of_weight else None,
            flat.sum(dim=0) if of_bias else None,
        )
