"""Dropout on adapters (Hu et al. 2021 leave inputs of A out, as Srivastava et al. 2014 do) that leaves importance ratios alone.

Ordinary dropout draws anew for every token of every call. Two calls on the same tokens then differ although no weight has moved, and
so would the ratio of their probabilities. Here what is left out is drawn once per generation and for all its tokens, the variational
dropout of Gal & Ghahramani (2016): some columns of each A are 0, in the old log-probabilities and in all passes alike. So the ratio is
that of two sets of weights, 1 before the first step; and it doesn't matter how tokens are packed, cut into micro-batches or spread over
processes. Engines, the reference and the canary use all columns.

With magnitudes (DoRA) what is left out is left out of the products with A alone: the lengths |W + scale * B @ A| that the magnitudes are
divided by are those of all columns.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class DroppedInputs(nn.Module):
    """Stands before an adapter's A, and leaves out some of its inputs where a mask says so.

    Args:
        share: Of the inputs that are left out.

    Attributes:
        mask: float [inputs], 0 or 1 / (1 - share); None: nothing is left out.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.mask: Tensor | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        """Apply the mask to inputs [.., inputs]."""
        if self.mask is None:
            return inputs
        self.mask = self.mask.to(inputs.device)  # once, for the host waits for it
        return inputs * self.mask.to(inputs.dtype)


@contextmanager
def dropped_inputs(model: nn.Module, *key: int | str) -> Iterator[None]:
    """Let a model's adapters leave out inputs, if they have dropout.

    Args:
        model: A model, possibly with adapters.
        key: What is drawn depends on it and on the layer's name alone: the run's seed and the generation.
    """
    dropping = [(name, one) for name, one in model.named_modules() if isinstance(one, DroppedInputs)]
    for name, one in dropping:
        layer = model.get_submodule(name.partition(".lora_dropout.")[0])
        # Weights may come to their device only when they are used (`distributed.offload_params`), so the inputs say where that is.
        one.mask = _mask((*key, name), one.share, layer)
    try:
        yield
    finally:
        for _, one in dropping:
            one.mask = None


def _mask(key: tuple[int | str, ...], share: float, layer: nn.Module) -> Tensor:
    """Draw on the CPU, so that all devices and processes have the same."""
    seed = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "big") >> 1
    kept = torch.rand(int(layer.in_features), generator=torch.Generator().manual_seed(seed)) >= share  # type: ignore[arg-type]
    return kept / (1 - share)
