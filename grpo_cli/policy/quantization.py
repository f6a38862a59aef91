"""Frozen weights in 4 or 8 bits, by bitsandbytes (QLoRA, Dettmers et al. 2023): what adapters are trained on where memory is short.

A layer computes with its weights as they are after rounding, brought back to a float for the time of the product. That is what a model
with the rounded weights computes, whatever else is in the batch; so engines and exported models get those.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from grpo_cli.device_memory import trim_heap
from grpo_cli.errors import ModelError
from grpo_cli.recipe.schema import ModelSection

QUANTIZATION_FILE = "quantization.json"
"""Says beside adapters how the weights below were rounded; PEFT has no word for it."""

_KEYS = ("dtype", "quantization", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype")

_BLOCK = 64
"""4-bit weights that share a scale."""

_MODULE = "bitsandbytes.nn.modules"


def quantization_config(section: ModelSection) -> Any:
    """Make what `from_pretrained` is told, or nothing.

    Raises:
        ModelError: If bitsandbytes is not installed.
    """
    if section.quantization is None:
        return None
    if find_spec("bitsandbytes") is None:
        raise ModelError(
            f"model.quantization: found {section.quantization}, but bitsandbytes is not installed here",
            hint='pip install "grpo-cli[quantization]"',
        )
    from transformers import BitsAndBytesConfig  # noqa: PLC0415

    if section.quantization == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=section.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=section.bnb_4bit_use_double_quant,
    )


def check_whole(config: Any, name: str) -> None:
    """Refuse a checkpoint whose weights are quantized already.

    Args:
        config: A transformers configuration.
        name: What the recipe calls the model.

    Raises:
        ModelError: If it is one, of whatever kind: in some the adapters' layers are not found, in others products depend on the batch.
    """
    for one in (config, config.get_text_config()):
        found = getattr(one, "quantization_config", None)
        if found:
            kind = (found if isinstance(found, Mapping) else vars(found)).get("quant_method", "of an unknown kind")
            raise ModelError(
                f"model.name_or_path: {name} has quantized weights ({getattr(kind, 'value', kind)}); allowed: a model with whole weights",
                hint="name the model that it was made of; with model.quantization: 4bit or 8bit its weights are rounded while it is loaded",
            )


def let_go_of_files(model: nn.Module) -> None:
    """Copy the weights that are not quantized, so that a model which was rounded while it was loaded holds nothing of its files.

    On a CPU weights that need no conversion are the file itself, mapped into memory. As long as one of them is, the pages that the others
    were rounded from stay there, too: all of the whole weights beside the small ones.

    Args:
        model: With quantized weights; elsewhere than on a CPU it is left alone.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu" and tensor.is_floating_point():
            tensor.data = tensor.data.clone()
    trim_heap(torch.device("cpu"))


def is_quantized(layer: nn.Module) -> bool:
    """Tell whether a layer is a linear one with weights in 4 or 8 bits."""
    kind = type(layer)
    return kind.__module__ == _MODULE and kind.__name__ in ("Linear4bit", "Linear8bitLt")


def dequantized(layer: Any) -> Tensor:
    """Give the weights [outputs, inputs] that a quantized layer computes with, in the precision that they were rounded from, or float32."""
    weight = layer.weight
    if hasattr(weight, "quant_state"):
        from bitsandbytes.functional import dequantize_4bit  # noqa: PLC0415  an optional dependency

        found: Tensor = dequantize_4bit(weight.data, weight.quant_state)
        return found
    scales = weight.SCB if weight.SCB is not None else layer.state.SCB
    # Each row has one scale: of its largest number, which became 127 (LLM.int8, Dettmers et al. 2022, eq. 2).
    floats: Tensor = weight.data.float() * (scales.float() / 127)[:, None]
    return floats


def compute_with_rounded_weights(model: nn.Module, section: ModelSection) -> None:
    """Let quantized layers multiply with their rounded weights, whatever they multiply.

    bitsandbytes has other ways for single rows and outside of training mode. With 8 bits, on a GPU, it would round what comes in as well,
    but for columns that are large in any row: then a token's log-probability depends on what else is in the batch, and is not that of any
    weights.

    Args:
        model: A transformers model.
        section: The recipe's `model:`, which says what products of 4-bit weights are computed in.
    """
    asked = section.bnb_4bit_compute_dtype
    dtype = None if asked == "auto" or section.quantization != "4bit" else getattr(torch, asked)
    for layer in model.modules():
        if is_quantized(layer):
            vars(layer)["forward"] = partial(_multiply, layer, dtype)
            vars(layer)["compute_dtype"] = (
                dtype  # for those who ask (see `computing_dtype`): transformers has put another one there
            )


def _multiply(layer: Any, dtype: torch.dtype | None, inputs: Tensor) -> Tensor:
    """Stand in for a quantized layer's forward."""
    device = inputs.device.type
    usual = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else inputs.dtype
    product: Tensor = _FrozenProduct.apply(inputs.to(dtype or usual), layer).to(usual)  # type: ignore[no-untyped-call]
    return product if layer.bias is None else product + layer.bias.to(usual)


class _FrozenProduct(torch.autograd.Function):
    """A product with frozen weights that are there as floats only while they are used."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, layer: Any) -> Tensor:
        ctx.layer = layer
        with torch.autocast(inputs.device.type, enabled=False):  # it would choose another precision than was asked for
            return nn.functional.linear(inputs, dequantized(layer).to(inputs.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        with torch.autocast(gradient.device.type, enabled=False):
            return gradient @ dequantized(ctx.layer).to(gradient.dtype), None


@dataclass(frozen=True, slots=True)
class DequantizedWeights:
    """A model's weights as floats; those that are not quantized pass through untouched.

    Attributes:
        model: The live model.
        named: Its weights under their names there; can be iterated again, and so can this.
    """

    model: nn.Module
    named: Iterable[tuple[str, Tensor]]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Give names and tensors."""
        for name, tensor in self.named:
            owner, _, part = name.rpartition(".")
            if part == "weight" and is_quantized(layer := self.model.get_submodule(owner)):
                yield name, dequantized(layer)
            else:
                yield name, tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedState:
    """What there will be of 4-bit weights besides their bits.

    Attributes:
        shape: Of the weights.
        absmax: Their scales, without numbers.
    """

    shape: torch.Size
    absmax: Tensor


def plan_quantization(model: Any, section: ModelSection) -> None:
    """Give a model without weights parameters of the kind and size that quantized ones will have.

    Args:
        model: On `meta`, with its adapters.
        section: The recipe's `model:`.
    """
    if section.quantization is None:
        return
    head = list(model.get_output_embeddings().modules())
    for name, layer in model.named_modules():
        if type(layer) is not nn.Linear or ".lora_" in name or layer in head:
            continue
        shape = layer.weight.shape
        packed = [math.ceil(shape.numel() / 2), 1] if section.quantization == "4bit" else shape
        kind = torch.uint8 if section.quantization == "4bit" else torch.int8
        layer.weight = nn.Parameter(torch.empty(packed, dtype=kind, device="meta"), requires_grad=False)
        if section.quantization == "4bit":
            scale = torch.uint8 if section.bnb_4bit_use_double_quant else torch.float32
            scales = torch.empty(math.ceil(shape.numel() / _BLOCK), dtype=scale, device="meta")
            vars(layer.weight)["quant_state"] = PlannedState(shape=shape, absmax=scales)


def write_quantization(section: ModelSection, folder: Path) -> None:
    """Write beside adapters how the weights below are rounded, if they are."""
    if section.quantization is not None:
        found = {key: getattr(section, key) for key in _KEYS}
        (folder / QUANTIZATION_FILE).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def with_quantization(section: ModelSection, folder: Path) -> ModelSection:
    """Say how the weights below the adapters of a folder are rounded, which may be not at all."""
    path = folder / QUANTIZATION_FILE
    if not path.is_file():
        return replace(section, quantization=None)
    found = json.loads(path.read_text(encoding="utf-8"))
    return replace(section, **{key: found[key] for key in _KEYS})
