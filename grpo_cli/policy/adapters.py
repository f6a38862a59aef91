"""Low-rank adapters: small trained matrices beside frozen weights (LoRA, Hu et al. 2021, eq. 3).

They live inside the model, put there by PEFT: the model keeps its class, and everything that knows transformers' models
knows it still.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from grpo_cli.errors import CheckpointError, ModelError
from grpo_cli.recipe.schema import LoraSection

NAME = "default"
"""What PEFT calls the adapter of a model that has one only."""

ADAPTER_FILE = "adapter_model.safetensors"

_COUNTS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""What configurations call the number of a layer's experts."""

_LINEAR = (nn.Linear, Conv1D)
"""But not what is made of them: a router may be one that does something else."""

_NAMES_IN_EXPERTS = frozenset(
    {"gate", "router", "shared_expert_gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
)

_PARTS = ("lora_A", "lora_B")

_PREFIX = "base_model.model."
"""What PEFT puts before the names in its files."""


def attach_adapters(model: Any, section: LoraSection, *, revision: str | None = None) -> None:
    """Freeze a model's weights and put adapters beside them. At first they change nothing: one of each two matrices is 0.

    There is no dropout on them: a token's log-probability would depend on which call computed it. They are trained in float32,
    whatever the precision of the weights.

    Args:
        model: A transformers model.
        section: The recipe's `model.lora`.
        revision: Of the model, to be noted beside its name.

    Raises:
        ModelError: If the model has no such layers, or they get no adapters.
    """
    from peft import LoraConfig  # noqa: PLC0415  it takes a second to import, and most runs do without
    from peft.tuners.lora import LoraLayer  # noqa: PLC0415

    wanted = _target_layers(model, section.target_modules)
    settings = LoraConfig(
        r=section.r,
        lora_alpha=section.alpha,
        lora_dropout=0.0,
        use_rslora=section.use_rslora,
        target_modules=wanted,
        revision=revision,
    )
    try:
        with warnings.catch_warnings():
            # PEFT warns of what it puts right itself, such as layers that keep their weight transposed.
            warnings.simplefilter("ignore")
            model.add_adapter(settings, adapter_name=NAME)
        found = [name for name, layer in model.named_modules() if isinstance(layer, LoraLayer)]
        if sorted(found) != sorted(wanted):
            raise ValueError(f"it would adapt {', '.join(sorted(set(found) ^ set(wanted))[:3])} otherwise")
    except ValueError as error:
        raise ModelError(
            f"model.lora.target_modules: PEFT cannot put adapters on these layers of {type(model).__name__}: {error}",
            hint="name other layers, such as [q_proj, v_proj]",
        ) from error
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype.itemsize < torch.float32.itemsize:
            parameter.data = parameter.data.float()


def _target_layers(model: Any, targets: Sequence[str]) -> list[str]:
    """Give the whole names of the layers that get adapters.

    In a mixture of experts `all-linear` leaves out routers and feed-forward layers, dense ones too: transformers keeps all experts of a
    layer as one tensor, and PEFT takes a name such as `up_proj` for that.

    Raises:
        ModelError: If there are none, or one is not a linear layer of the model's body.
    """
    head = model.get_output_embeddings()
    layers = [name for name, layer in model.named_modules() if type(layer) in _LINEAR and layer is not head]
    if list(targets) == ["all-linear"]:
        config = model.config.get_text_config()
        is_mixture = any(getattr(config, count, None) for count in _COUNTS_OF_EXPERTS)
        return [name for name in layers if not (is_mixture and name.rpartition(".")[2] in _NAMES_IN_EXPERTS)]
    known = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
    found: dict[str, None] = {}
    for target in targets:
        matching = [name for name, _ in model.named_modules() if f".{name}".endswith(f".{target}")]
        if not matching:
            raise ModelError(
                f"model.lora.target_modules: {type(model).__name__} has no layers called {target}",
                hint=f"its linear layers are {known}",
            )
        wrong = next((name for name in matching if name not in layers), None)
        if wrong is not None:
            raise ModelError(
                f"model.lora.target_modules: {wrong} gets no adapters; allowed: linear layers other than the head",
                hint=f"which are {known}",
            )
        found |= dict.fromkeys(matching)
    return list(found)


def load_adapters(model: Any, folder: Path) -> None:
    """Put a model's adapters where a checkpoint left them.

    Args:
        model: With adapters of the same kind.
        folder: As `save_pretrained` wrote it.

    Raises:
        CheckpointError: If there are none, or they are others.
    """
    if not (folder / ADAPTER_FILE).is_file():
        raise CheckpointError(f"{folder} holds no adapters: its run trained all weights, without model.lora")
    saved = {name.removeprefix(_PREFIX): tensor for name, tensor in load_file(folder / ADAPTER_FILE).items()}
    wanted = {name.replace(f".{NAME}.", "."): one for name, one in model.named_parameters() if one.requires_grad}
    if {name: one.shape for name, one in saved.items()} != {name: one.shape for name, one in wanted.items()}:
        raise CheckpointError(f"{folder} holds adapters of other layers or sizes than model.lora asks for")
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(saved[name])


def has_adapters(model: Any) -> bool:
    """Tell whether a transformers model has adapters."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


@contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """Let a model compute as if it had no adapters.

    PEFT's own way would also freeze them and thaw them again, which is lost on parameters that are cut into parts meanwhile.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer  # noqa: PLC0415  it takes a second to import, and most runs do without

    layers = [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True  # noqa: SLF001
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False  # noqa: SLF001


@dataclass(frozen=True, slots=True)
class MergedWeights:
    """A model's weights as one without adapters would have them to compute the same: W + scale * B @ A.

    One layer at a time is merged, in the higher precision of the two.

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
            owner, part = _split(name)
            if parts and owner != layer:
                yield from self._merged(layer, parts)
                parts = {}
            if owner is None:
                yield name, tensor
            else:
                layer, parts[part] = owner, tensor
        if parts:
            yield from self._merged(layer, parts)

    def _merged(self, layer: str, parts: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Merge one layer's weight, and give its bias as it is."""
        module: Any = self.model.get_submodule(layer)
        outer, inner = parts.pop("lora_B"), parts.pop("lora_A")
        for name, tensor in parts.items():
            if name != "weight":
                yield f"{layer}.{name}", tensor
                continue
            change = module.scaling[NAME] * (outer @ inner)
            yield f"{layer}.{name}", tensor + (change.t() if module.fan_in_fan_out else change)


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
            layer, part = _split(name)
            if layer is None:
                yield name, tensor
            elif part not in _PARTS:
                yield f"{layer}.{part}", tensor


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
            layer, part = _split(name)
            if layer is not None and part in _PARTS:
                module: Any = self.model.get_submodule(layer)
                yield f"{layer}.{part}", tensor * module.scaling[NAME] if part == "lora_B" else tensor


def _split(name: str) -> tuple[str | None, str]:
    """Split the name of a parameter of a layer with adapters into the layer's and `weight`, `bias`, `lora_A` or `lora_B`."""
    for part in _PARTS:
        layer, found, _ = name.partition(f".{part}.{NAME}.")
        if found:
            return layer, part
    layer, found, part = name.partition(".base_layer.")
    return (layer, part) if found else (None, name)
