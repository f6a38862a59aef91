"""The weights of a model with adapters as others want them: merged, those below, or the adapters alone."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

NAME = "default"
"""What PEFT calls the adapter of a model that has one only."""

_MATRICES = ("lora_A", "lora_B")
_MAGNITUDE = "lora_magnitude_vector"
_BASE, _FROZEN, _COPIES = "base_layer", "original_module", "modules_to_save"


@dataclass(frozen=True, slots=True)
class MergedWeights:
    """A model's weights as one without adapters would have them to compute the same.

    W' = W + scale * B @ A (LoRA, Hu et al. 2021, eq. 3); with magnitudes m (DoRA, Liu et al. 2024, eq. 5), the rows of that have these
    lengths: m * W' / |W'|. One layer at a time is merged, in the higher precision of the two. Of modules that are trained whole, the
    trained copy is given.

    Attributes:
        model: The live model, for the scales.
        named: Its weights under their names there, layer by layer; can be iterated again, and so can this.
    """

    model: nn.Module
    named: Iterable[tuple[str, Tensor]]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Give names and tensors; those of layers without adapters are the model's own."""
        layer, parts = "", dict[str, Tensor]()
        for name, tensor in self.named:
            owner, kind, rest = _split(name)
            if parts and owner != layer:
                yield from self._merged(layer, parts)
                parts = {}
            if kind == "":
                yield name, tensor
            elif kind == _COPIES:
                yield f"{owner}.{rest}", tensor
            elif kind in (_BASE, *_MATRICES, _MAGNITUDE):
                layer, parts[rest if kind == _BASE else kind] = owner, tensor
        if parts:
            yield from self._merged(layer, parts)

    def _merged(self, layer: str, parts: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Merge one layer's weight, and give its bias as it is."""
        module: Any = self.model.get_submodule(layer)
        outer, inner, magnitude = parts.pop("lora_B"), parts.pop("lora_A"), parts.pop(_MAGNITUDE, None)
        for name, tensor in parts.items():
            if name != "weight":
                yield f"{layer}.{name}", tensor
                continue
            change = module.scaling[NAME] * (outer @ inner)
            is_transposed = getattr(module, "fan_in_fan_out", False)  # quantized layers are not asked
            merged = tensor + (change.t() if is_transposed else change)
            if magnitude is not None:
                # Each output has a length: a row, or a column where the weight is kept transposed.
                lengths = torch.linalg.vector_norm(merged, dim=0 if is_transposed else 1, keepdim=True)
                merged = magnitude.view_as(lengths) / lengths * merged
            yield f"{layer}.{name}", merged


@dataclass(frozen=True, slots=True)
class FrozenWeights:
    """A model's weights without its adapters, under the names that they have in a model that has none.

    Attributes:
        named: All weights of the live model under their names there; can be iterated again, and so can this.
    """

    named: Iterable[tuple[str, Tensor]]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Give names and tensors."""
        for name, tensor in self.named:
            owner, kind, rest = _split(name)
            if kind == "":
                yield name, tensor
            elif kind in (_BASE, _FROZEN):
                yield f"{owner}.{rest}", tensor


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """A model's adapters alone: their outcome is B @ A of what is given here.

    Attributes:
        model: The live model, for the scales.
        named: Its weights under their names there; can be iterated again, and so can this.
    """

    model: nn.Module
    named: Iterable[tuple[str, Tensor]]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Give names, such as `model.layers.0.mlp.up_proj.lora_A`, and tensors: A [r, inputs], and B [outputs, r] with the scale in it."""
        for name, tensor in self.named:
            owner, kind, _ = _split(name)
            if kind in _MATRICES:
                module: Any = self.model.get_submodule(owner)
                yield f"{owner}.{kind}", tensor * module.scaling[NAME] if kind == "lora_B" else tensor


def is_adapter(name: str, *, of: str | None = None) -> bool:
    """Tell whether a parameter is one of an adapter, or of a module that is trained whole beside it.

    Args:
        name: Of the parameter.
        of: What PEFT calls the adapter; None: any.
    """
    for kind in (*_MATRICES, _MAGNITUDE, _COPIES):
        _, found, rest = name.partition(f".{kind}.")
        if found:
            return of is None or rest.startswith(f"{of}.")
    return False


def _split(name: str) -> tuple[str, str, str]:
    """Split the name of a parameter by what PEFT has put into it.

    Returns:
        The name of the layer; what of its the parameter is, or `other` for one of an adapter that is not trained, or nothing for a layer
        without adapters; and the rest of the name.
    """
    for kind in (*_MATRICES, _MAGNITUDE, _COPIES):
        owner, found, rest = name.partition(f".{kind}.")
        if found:
            adapter, _, rest = rest.partition(".")
            return owner, kind if adapter == NAME else "other", rest
    for kind in (_BASE, _FROZEN):
        owner, found, rest = name.partition(f".{kind}.")
        if found:
            return owner, kind, rest
    return "", "", name
