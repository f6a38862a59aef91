"""Which modules are trained whole beside adapters."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import nn

from grpo_cli.errors import ModelError
from grpo_cli.policy.parts import PARTS, parameters_of
from grpo_cli.policy.quantization import is_quantized
from grpo_cli.recipe.suggest import did_you_mean

_KEY = "model.lora.modules_to_save"


def whole_modules(model: Any, names: Sequence[str], *, frozen: Collection[int] = ()) -> list[str]:
    """Give the whole names of the modules that are trained whole: of what has no weights of its own, those inside it.

    Args:
        model: A transformers model without adapters.
        names: Ends of names, or parts of a vision-language model (see `parameters_of`).
        frozen: Parameters that stay as they are, by `id`.

    Raises:
        ModelError: If there is none of a name, one has no weights at all, it is quantized or frozen.
    """
    found: dict[str, None] = {}
    modules = dict(model.named_modules())
    for name in names:
        for whole in _meant(model, name):
            if is_quantized(modules[whole]):
                raise ModelError(
                    f"{_KEY}: {whole} is quantized (model.quantization), and cannot be trained whole",
                    hint="name embeddings, norms or the head, or put adapters on it",
                )
            if any(id(one) in frozen for one in modules[whole].parameters(recurse=False)):
                raise ModelError(
                    f"{_KEY}: {whole} is in a part that stays as it is (model.freeze); allowed: one of the two",
                    hint="leave it out here or there",
                )
            found[whole] = None
    return list(found)


def _meant(model: nn.Module, name: str) -> list[str]:
    """Give the modules with weights that a name means."""
    if name in PARTS:
        matching = _of_part(model, name)
    else:
        matching = [whole for whole, _ in model.named_modules() if f".{whole}".endswith(f".{name}")]
    if not matching:
        known = sorted({whole.rpartition(".")[2] for whole, one in model.named_modules() if _has_weights(one)})
        hint = f"those with weights are {', '.join(known)}"
        close = did_you_mean(name, [*PARTS, *known])
        raise ModelError(
            f"{_KEY}: {type(model).__name__} has no modules called {name}", hint=f"{close} {hint}" if close else hint
        )
    found = [inner for whole in matching for inner in _with_weights(whole, model.get_submodule(whole))]
    if not found:
        raise ModelError(f"{_KEY}: {matching[0]} has no weights; allowed: modules that have")
    return found


def _of_part(model: nn.Module, part: str) -> list[str]:
    """Give the modules that the weights of a part belong to.

    Raises:
        ModelError: If one of them belongs to a module that has others inside it, as LLaVA-NeXT's `image_newline` does.
    """
    parameters = parameters_of(model, part)
    owners = list(dict.fromkeys(name.rpartition(".")[0] for name in parameters))
    inside = {one: {f"{one}.{name}" for name, _ in model.get_submodule(one).named_parameters()} for one in owners}
    own = [one for one in owners if inside[one] <= parameters.keys()]
    if own != owners:
        alone = next(name for name in parameters if name.rpartition(".")[0] not in own)
        raise ModelError(
            f"{_KEY}: {part} has a weight that is in no module of its own, {alone}; allowed: modules",
            hint=f"name those of it: {', '.join(own)}",
        )
    return [one for one in own if not any(one.startswith(f"{other}.") for other in own)]


def _with_weights(name: str, module: nn.Module) -> Iterator[str]:
    """Give a module that has weights of its own, or else those inside it that have."""
    if _has_weights(module):
        yield name
        return
    for inner, child in module.named_children():
        yield from _with_weights(f"{name}.{inner}", child)


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))
