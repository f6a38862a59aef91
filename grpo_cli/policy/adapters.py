"""Low-rank adapters: small trained matrices beside frozen weights (LoRA, Hu et al. 2021, eq. 3).

They live inside the model, put there by PEFT: the model keeps its class, and everything that knows transformers' models
knows it still.
"""

import copy
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from grpo_cli.errors import CheckpointError, ModelError
from grpo_cli.policy.adapter_dropout import DroppedInputs
from grpo_cli.policy.adapter_settings import WEIGHTS_FILE
from grpo_cli.policy.adapter_sizes import PREFIX, sizes_in
from grpo_cli.policy.adapter_targets import target_layers
from grpo_cli.policy.adapter_weights import NAME, is_adapter
from grpo_cli.policy.quantization import dequantized, is_quantized
from grpo_cli.policy.whole_modules import whole_modules
from grpo_cli.recipe.schema import LoraSection
from grpo_cli.sharding import whole_shape

REFERENCE = "reference"
"""What the adapters are called that a run has gone on from, where they are the reference."""


def attach_adapters(
    model: Any, section: LoraSection, *, frozen: Collection[int] = (), revision: str | None = None
) -> None:
    """Freeze a model's weights and put adapters beside them. At first they change nothing: one of each two matrices is 0.

    They are trained in float32, whatever the precision of the weights; copies of modules that are trained whole, in that of the weights.
    Where a model's head is its embedding, both are trained as one.

    Args:
        model: A transformers model.
        section: The recipe's `model.lora`.
        frozen: Parameters that stay as they are, by `id`: what they belong to gets no adapters.
        revision: Of the model, to be noted beside its name.

    Raises:
        ModelError: If the model has no such layers, or they get no adapters.
    """
    from peft import LoraConfig  # noqa: PLC0415  it takes a second to import, and most runs do without
    from peft.tuners.lora import LoraLayer  # noqa: PLC0415

    copied = whole_modules(model, section.modules_to_save, frozen=frozen)
    wanted = target_layers(model, section.target_modules, frozen=frozen, whole=copied)
    settings = LoraConfig(
        r=section.r,
        lora_alpha=section.alpha,
        lora_dropout=section.dropout,
        use_rslora=section.use_rslora,
        use_dora=section.use_dora,
        target_modules=wanted,
        modules_to_save=copied or None,
        ensure_weight_tying=_has_tied_head(model) and _has_embedding(model, copied),
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
    _train_in_float32(model)
    _measure_magnitudes(model)
    if section.dropout:
        for layer in model.modules():
            if isinstance(layer, LoraLayer):
                layer.lora_dropout[NAME] = DroppedInputs(section.dropout)


def _train_in_float32(model: nn.Module) -> None:
    """Make adapters float32, those of the reference as well."""
    for name, parameter in model.named_parameters():
        if ".lora_" in name and parameter.dtype.itemsize < torch.float32.itemsize:
            parameter.data = parameter.data.float()


def _measure_magnitudes(model: nn.Module) -> None:
    """Make magnitudes (DoRA) the lengths that layers compute with, in float32.

    PEFT rounds the first to the precision of the weights, so that new adapters would change what a model says.
    """
    from peft.utils.integrations import gather_params_ctx  # noqa: PLC0415

    layers: list[Any] = [one for one in model.modules() if NAME in getattr(one, "lora_magnitude_vector", ())]
    for layer in layers:
        base = layer.base_layer
        if base.weight.device.type == "meta":
            continue
        with torch.no_grad(), gather_params_ctx([base.weight], modifier_rank=None):
            weight = dequantized(base) if is_quantized(base) else base.weight
            # Each output has a length: a row, or a column where the weight is kept transposed; quantized layers are not asked.
            dimension = 0 if getattr(layer, "fan_in_fan_out", False) else 1
            lengths = torch.linalg.vector_norm(weight.float(), dim=dimension)
        _set(layer.lora_magnitude_vector[NAME].weight, lengths)


def _has_tied_head(model: Any) -> bool:
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def _has_embedding(model: Any, names: list[str]) -> bool:
    """Tell whether embedding or head are among some modules."""
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    return any(model.get_submodule(name) in ends for name in names)


def load_adapters(model: Any, folder: Path) -> None:
    """Put a model's adapters where a checkpoint left them.

    Args:
        model: With adapters of the same kind.
        folder: As `save_pretrained` wrote it.

    Raises:
        CheckpointError: If there are none, or they are others.
    """
    check_adapters(model, folder)
    saved = {name.removeprefix(PREFIX): tensor for name, tensor in load_file(folder / WEIGHTS_FILE).items()}
    for name, parameter in _own(model, NAME):
        _set(parameter, saved[_name_in_file(name, NAME)])


def check_adapters(model: Any, folder: Path) -> None:
    """Compare names and sizes of a model's adapters with those of a checkpoint; nothing is read of either's weights.

    Raises:
        CheckpointError: As `load_adapters` does.
    """
    if not (folder / WEIGHTS_FILE).is_file():
        raise CheckpointError(
            f"{folder} holds no adapters (it has no {WEIGHTS_FILE})", hint="a run without model.lora trains all weights"
        )
    there = sizes_in(folder)
    asked = {_name_in_file(name, NAME): whole_shape(one) for name, one in _own(model, NAME)}
    other = min((name for name in there | asked if there.get(name) != asked.get(name)), default=None)
    if other is not None:
        problem = (
            "has another size"
            if other in there and other in asked
            else f"is {'not asked for' if other in there else 'missing'}"
        )
        raise CheckpointError(
            f"{folder} holds adapters of other layers or sizes than model.lora asks for: {other} {problem}"
        )


def save_adapters(
    model: Any, folder: Path, *, adapter: str = NAME, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Write a model's adapters as PEFT does, and modules that are trained whole with them.

    Not by `save_pretrained`: of a head that is the embedding it leaves one out, without which PEFT does not load them.

    Args:
        model: With adapters.
        folder: Where to; made if it is not there.
        adapter: Which; `REFERENCE`: those that `keep_as_reference` kept.
        weights: Of all adapters, by name, if the model's own are in parts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model.peft_config[adapter].save_pretrained(folder)
    first = {parameter: name for name, parameter in model.named_parameters()}
    found = {
        f"{PREFIX}{_name_in_file(name, adapter)}": parameter if weights is None else weights[first[parameter]]
        for name, parameter in _own(model, adapter)
    }
    # Clones, since a file cannot hold one tensor under two names.
    tensors = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in found.items()
    }
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def _own(model: nn.Module, adapter: str) -> Iterator[tuple[str, nn.Parameter]]:
    """Give the parameters of an adapter, under each name that they have."""
    return ((name, one) for name, one in model.named_parameters(remove_duplicate=False) if is_adapter(name, of=adapter))


def _name_in_file(name: str, adapter: str) -> str:
    """Name a parameter of an adapter as PEFT's files do."""
    name = name.replace(f".modules_to_save.{adapter}.", ".").replace(f".{adapter}.", ".")
    return name.removesuffix(".weight") if name.endswith(".lora_magnitude_vector.weight") else name


def has_adapters(model: Any) -> bool:
    """Tell whether a transformers model has adapters."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def keeps_reference(model: Any) -> bool:
    """Tell whether a transformers model has adapters that `keep_as_reference` kept."""
    return has_adapters(model) and REFERENCE in model.peft_config


def keep_as_reference(model: Any) -> None:
    """Keep a frozen copy of a model's adapters, and of modules that are trained whole, as they are now. See `with_reference_adapters`."""
    settings = copy.deepcopy(model.peft_config[NAME])
    settings.lora_dropout = 0.0
    # Beside weights that are there PEFT would measure the first magnitudes; on `meta` there are none.
    place = torch.device("meta") if model.device.type == "meta" else nullcontext()
    with warnings.catch_warnings(), place:
        warnings.simplefilter("ignore")
        model.add_adapter(settings, adapter_name=REFERENCE)
    model.set_adapter(NAME)
    _train_in_float32(model)  # before they are given values, which bfloat16 would round
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    kept = dict(model.named_parameters())
    for name, parameter in trained.items():
        _set(kept[name.replace(f".{NAME}.", f".{REFERENCE}.")], parameter)


def _set(parameter: nn.Parameter, value: Tensor) -> None:
    """Give a parameter a value; DeepSpeed may have cut both."""
    from peft.utils.integrations import gather_params_ctx  # noqa: PLC0415

    with torch.no_grad(), gather_params_ctx([parameter], modifier_rank=0), gather_params_ctx([value]):
        parameter.copy_(value)


@contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """Let a model compute as if it had no adapters.

    PEFT's own way would also freeze them and thaw them again, which is lost on parameters that are cut into parts meanwhile.
    """
    layers = _switches(model)
    for layer in layers:
        layer._disable_adapters = True  # noqa: SLF001
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False  # noqa: SLF001


@contextmanager
def with_reference_adapters(model: Any) -> Iterator[None]:
    """Let a model compute with the adapters that `keep_as_reference` kept."""
    layers = _switches(model)
    for layer in layers:
        layer._active_adapter = [REFERENCE]  # noqa: SLF001
    try:
        yield
    finally:
        for layer in layers:
            layer._active_adapter = [NAME]  # noqa: SLF001


def _switches(model: nn.Module) -> list[Any]:
    """List the modules that PEFT has put between a model and its layers."""
    from peft.tuners.tuners_utils import BaseTunerLayer  # noqa: PLC0415  it takes a second to import, and most runs do without
    from peft.utils import ModulesToSaveWrapper  # noqa: PLC0415

    return [one for one in model.modules() if isinstance(one, (BaseTunerLayer, ModulesToSaveWrapper))]


def output_head(model: Any) -> nn.Module:
    """Give the head that a model computes with now: it may be a copy that is trained whole."""
    head: Any = model.get_output_embeddings()
    copies = getattr(head, "modules_to_save", None)
    if copies is None:
        return head  # type: ignore[no-any-return]
    found: nn.Module = head.original_module if head.disable_adapters else copies[head.active_adapters[0]]
    return found
