"""Parts of a model by the names that recipes have for them, to be frozen or to learn at a rate of their own."""

from collections.abc import Mapping, Sequence

from torch import nn

from grpo_cli.errors import ModelError
from grpo_cli.recipe.suggest import did_you_mean

VISION_TOWER, PROJECTOR, LANGUAGE_MODEL = "vision_tower", "projector", "language_model"
"""Of every vision-language model, whatever its family calls them."""

_VISION_MODULES = frozenset({"vision_tower", "visual", "vision_model", "vision_embed_tokens"})
_PROJECTOR_MODULES = frozenset(
    {"multi_modal_projector", "connector", "merger", "deepstack_merger_list", "image_newline", "aligner"}
)


def parameters_of(model: nn.Module, part: str) -> dict[str, nn.Parameter]:
    """Give the parameters of a part of a model.

    Args:
        model: A transformers model.
        part: `vision_tower`, `projector` (what brings its features into the text model), `language_model` (all else of a
            vision-language model, its head included), or the name of a module, such as `model.layers.0` or `lm_head`.

    Returns:
        Parameters by name; none if the model has no such part.
    """
    return {name: one for name, one in model.named_parameters() if _is_in(name, part, model)}


def freeze(model: nn.Module, parts: Sequence[str]) -> frozenset[int]:
    """Keep parts of a model as they are.

    Returns:
        Which parameters those are, by `id`.

    Raises:
        ModelError: If the model has no such part, or nothing is left to train.
    """
    frozen = [one for part in parts for one in _known(model, part, key="model.freeze").values()]
    for parameter in frozen:
        parameter.requires_grad_(False)
    if parts and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(f"model.freeze: nothing is left to train without {', '.join(parts)}", hint="leave one out")
    return frozenset(map(id, frozen))


def learning_rates(model: nn.Module, rates: Mapping[str, float]) -> dict[int, float]:
    """Tell which parameters have a learning rate of their own, by `id`.

    Raises:
        ModelError: If the model has no such part, or two parts have parameters in common.
    """
    found: dict[int, float] = {}
    for part, rate in rates.items():
        ours = {id(parameter) for parameter in _known(model, part, key="train.learning_rates").values()}
        if ours & found.keys():
            raise ModelError(
                f"train.learning_rates: {part} has weights that another part there has, too", hint="name each part once"
            )
        found |= dict.fromkeys(ours, rate)
    return found


def _known(model: nn.Module, part: str, *, key: str) -> dict[str, nn.Parameter]:
    found = parameters_of(model, part)
    if found:
        return found
    modules = [name for name, _ in model.named_modules() if name]
    parts = [name for name in (VISION_TOWER, PROJECTOR, LANGUAGE_MODEL) if parameters_of(model, name)]
    raise ModelError(
        f"{key}: {type(model).__name__} has no part called {part}; allowed: {', '.join([*parts, 'the name of a module'])}",
        hint=did_you_mean(part, [*parts, *modules]),
    )


def _is_in(name: str, part: str, model: nn.Module) -> bool:
    """Tell whether a parameter is in a part."""
    places = frozenset(name.split("."))
    in_projector, in_vision = bool(places & _PROJECTOR_MODULES), bool(places & _VISION_MODULES)
    match part:
        case "projector":
            return in_projector
        case "vision_tower":
            return in_vision and not in_projector
        case "language_model":
            return not in_projector and not in_vision and hasattr(getattr(model, "config", None), "vision_config")
        case _:
            return f".{part}." in f".{name}."
