"""Which layers of a model get adapters, and which modules are trained whole beside them."""

from collections.abc import Collection, Sequence
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from grpo_cli.errors import ModelError
from grpo_cli.policy.quantization import is_quantized

_COUNTS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""What configurations call the number of a layer's experts."""

_LINEAR = (nn.Linear, Conv1D)
"""But not what is made of them: a router may be one that does something else."""

_NAMES_IN_EXPERTS = frozenset(
    {"gate", "router", "shared_expert_gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
)


def target_layers(model: Any, targets: Sequence[str], *, frozen: Collection[int] = ()) -> list[str]:
    """Give the whole names of the layers that get adapters.

    In a mixture of experts `all-linear` leaves out routers and feed-forward layers, dense ones too: transformers keeps all experts of a
    layer as one tensor, and PEFT takes a name such as `up_proj` for that. Frozen layers are left out of it, too; of those that are named,
    none may be frozen.

    Args:
        model: A transformers model without adapters.
        targets: Ends of names, or `all-linear`.
        frozen: Parameters that stay as they are, by `id`.

    Raises:
        ModelError: If there are none, or one is frozen, or not a linear layer of the model's body.
    """
    head = model.get_output_embeddings()
    layers = [
        name
        for name, layer in model.named_modules()
        if (type(layer) in _LINEAR or is_quantized(layer)) and layer is not head
    ]
    if list(targets) == ["all-linear"]:
        config = model.config.get_text_config()
        is_mixture = any(getattr(config, count, None) for count in _COUNTS_OF_EXPERTS)
        open_to_all = [name for name in layers if not (is_mixture and name.rpartition(".")[2] in _NAMES_IN_EXPERTS)]
        free = [name for name in open_to_all if not _is_frozen(model.get_submodule(name), frozen)]
        if open_to_all and not free:
            raise ModelError(
                "model.freeze: it leaves no linear layer that could get adapters (model.lora)", hint="leave a part out"
            )
        return free
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
        fixed = next((name for name in matching if _is_frozen(model.get_submodule(name), frozen)), None)
        if fixed is not None:
            raise ModelError(
                f"model.lora.target_modules: {fixed} is in a part that stays as it is (model.freeze); allowed: layers outside of it",
                hint="name layers by more of their names, such as language_model.layers.0.self_attn.q_proj, or leave the part out of model.freeze",
            )
        found |= dict.fromkeys(matching)
    return list(found)


def whole_modules(
    model: Any, names: Sequence[str], *, adapted: Sequence[str], frozen: Collection[int] = ()
) -> list[str]:
    """Give the whole names of the modules that are trained whole.

    Args:
        model: A transformers model without adapters.
        names: Ends of names.
        adapted: Whole names of the layers that get adapters.
        frozen: Parameters that stay as they are, by `id`.

    Raises:
        ModelError: If there is none of a name, one has no weights of its own, it is frozen, or it gets adapters, too.
    """
    found: dict[str, None] = {}
    modules = dict(model.named_modules())
    for name in names:
        matching = [whole for whole in modules if f".{whole}".endswith(f".{name}")]
        if not matching:
            own = {whole.rpartition(".")[2] for whole, one in modules.items() if _has_weights(one)}
            raise ModelError(
                f"model.lora.modules_to_save: {type(model).__name__} has no modules called {name}",
                hint=f"those with weights are {', '.join(sorted(own))}",
            )
        for whole in matching:
            if not _has_weights(modules[whole]):
                raise ModelError(
                    f"model.lora.modules_to_save: {whole} has no weights of its own; allowed: modules that have",
                    hint="name the modules inside it",
                )
            if is_quantized(modules[whole]):
                raise ModelError(
                    f"model.lora.modules_to_save: {whole} is quantized (model.quantization), and cannot be trained whole",
                    hint="name embeddings, norms or the head, or put adapters on it",
                )
            if _is_frozen(modules[whole], frozen):
                raise ModelError(
                    f"model.lora.modules_to_save: {whole} is in a part that stays as it is (model.freeze); allowed: one of the two",
                    hint="leave it out here or there",
                )
            if whole in adapted:
                raise ModelError(
                    f"model.lora.modules_to_save: {whole} gets adapters as well; allowed: one of the two",
                    hint="leave it out of model.lora.target_modules, or here",
                )
        found |= dict.fromkeys(matching)
    return list(found)


def _is_frozen(module: nn.Module, frozen: Collection[int]) -> bool:
    return any(id(parameter) in frozen for parameter in module.parameters(recurse=False))


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))
