"""Which layers of a model get adapters."""

from collections.abc import Collection, Sequence
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from grpo_cli.errors import ModelError
from grpo_cli.policy.quantization import is_quantized
from grpo_cli.recipe.suggest import did_you_mean

_COUNTS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""What configurations call the number of a layer's experts."""

_LINEAR = (nn.Linear, Conv1D)
"""But not what is made of them: a router may be one that does something else."""

_NAMES_IN_EXPERTS = frozenset(
    {"gate", "router", "shared_expert_gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
)


def target_layers(
    model: Any, targets: Sequence[str], *, frozen: Collection[int] = (), whole: Collection[str] = ()
) -> list[str]:
    """Give the whole names of the layers that get adapters.

    In a mixture of experts `all-linear` leaves out routers and feed-forward layers, dense ones too: transformers keeps all experts of a
    layer as one tensor, and PEFT takes a name such as `up_proj` for that. Layers that are frozen or trained whole are left out of it,
    too; of those that are named, none may be one.

    Args:
        model: A transformers model without adapters.
        targets: Ends of names, or `all-linear`.
        frozen: Parameters that stay as they are, by `id`.
        whole: Names of the modules that are trained whole.

    Raises:
        ModelError: If there are none, or one is frozen, trained whole, or not a linear layer of the model's body.
    """
    head = model.get_output_embeddings()
    layers = [
        name
        for name, layer in model.named_modules()
        if (type(layer) in _LINEAR or is_quantized(layer)) and layer is not head
    ]
    if list(targets) == ["all-linear"]:
        return _free_layers(model, layers, frozen=frozen, whole=whole)
    kinds = sorted({name.rpartition(".")[2] for name in layers})
    known = ", ".join(kinds)
    found: dict[str, None] = {}
    for target in targets:
        matching = [name for name, _ in model.named_modules() if f".{name}".endswith(f".{target}")]
        if not matching:
            close = did_you_mean(target, kinds)
            raise ModelError(
                f"model.lora.target_modules: {type(model).__name__} has no layers called {target}",
                hint=f"{close} its linear layers are {known}" if close else f"its linear layers are {known}",
            )
        wrong = next((name for name in matching if name not in layers), None)
        if wrong is not None:
            raise ModelError(
                f"model.lora.target_modules: {wrong} gets no adapters; allowed: linear layers other than the head",
                hint=f"which are {known}",
            )
        fixed = next((name for name in matching if _is_frozen(model.get_submodule(name), frozen)), None)
        if fixed is not None:
            raise ModelError(
                f"model.lora.target_modules: {fixed} is in a part that stays as it is (model.freeze); allowed: layers outside of it",
                hint="name layers by more of their names, such as language_model.layers.0.self_attn.q_proj, or leave the part out of model.freeze",
            )
        both = next((name for name in matching if name in whole), None)
        if both is not None:
            raise ModelError(
                f"model.lora.modules_to_save: {both} gets adapters as well; allowed: one of the two",
                hint="leave it out of model.lora.target_modules, or here",
            )
        found |= dict.fromkeys(matching)
    return list(found)


def _free_layers(model: Any, layers: Sequence[str], *, frozen: Collection[int], whole: Collection[str]) -> list[str]:
    """Give the layers that `all-linear` means."""
    config = model.config.get_text_config()
    is_mixture = any(getattr(config, count, None) for count in _COUNTS_OF_EXPERTS)
    open_to_all = [name for name in layers if not (is_mixture and name.rpartition(".")[2] in _NAMES_IN_EXPERTS)]
    free = [name for name in open_to_all if name not in whole and not _is_frozen(model.get_submodule(name), frozen)]
    if open_to_all and not free:
        key = "model.freeze" if frozen else "model.lora.modules_to_save"
        raise ModelError(
            f"{key}: it leaves no linear layer that could get adapters (model.lora)", hint="leave a part out"
        )
    return free


def _is_frozen(module: nn.Module, frozen: Collection[int]) -> bool:
    return any(id(parameter) in frozen for parameter in module.parameters(recurse=False))
