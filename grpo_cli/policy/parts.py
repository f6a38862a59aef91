"""Parts of a model by the names that recipes have for them, to be frozen or to learn at a rate of their own."""

from collections.abc import Mapping, Sequence

from torch import nn

from grpo_cli.errors import ModelError
from grpo_cli.recipe.suggest import did_you_mean

VISION_TOWER, PROJECTOR, LANGUAGE_MODEL = "vision_tower", "projector", "language_model"
"""Of every vision-language model, whatever its family calls them."""
PARTS = (VISION_TOWER, PROJECTOR, LANGUAGE_MODEL)

_VISION_MODULES = frozenset({"vision_tower", "visual", "vision_model", "vision_embed_tokens"})
_PROJECTOR_MODULES = frozenset(
    {"multi_modal_projector", "connector", "merger", "deepstack_merger_list", "image_newline", "aligner"}
)
_NAMES_SHOWN = 4


def parameters_of(model: nn.Module, part: str) -> dict[str, nn.Parameter]:
    """Give the parameters of a part of a model.

    Args:
        model: A transformers model.
        part: `vision_tower`, `projector` (what brings its features into the text model), `language_model` (all else of a
            vision-language model, its head included), or the name of a module, such as `model.layers.0` or `lm_head`; what it begins with
            may be left out.

    Returns:
        Parameters by name; none if the model has no such part. Of several modules that a name may mean, those of all.
    """
    modules = _modules(model, part)
    return {name: one for name, one in model.named_parameters() if _is_in(name, part, model, modules)}


def freeze(model: nn.Module, parts: Sequence[str]) -> frozenset[int]:
    """Keep parts of a model as they are.

    Returns:
        Which parameters those are, by `id`.

    Raises:
        ModelError: If the model has no such part, a name may mean several, or nothing is left to train.
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
        ModelError: If the model has no such part, a name may mean several, two parts have parameters in common, or nothing of one is
            trained.
    """
    found: dict[int, float] = {}
    for part, rate in rates.items():
        parameters = _known(model, part, key="train.learning_rates").values()
        if not any(parameter.requires_grad for parameter in parameters):
            raise ModelError(
                f"train.learning_rates: {part} has a rate of its own, but none of its weights is trained",
                hint="leave it out there, or have it trained: take it out of model.freeze, or put adapters on it (model.lora.target_modules)",
            )
        ours = {id(parameter) for parameter in parameters}
        if ours & found.keys():
            raise ModelError(
                f"train.learning_rates: {part} has weights that another part there has, too", hint="name each part once"
            )
        found |= dict.fromkeys(ours, rate)
    return found


def _known(model: nn.Module, part: str, *, key: str) -> dict[str, nn.Parameter]:
    meant = _modules(model, part)
    if len(meant) > 1:
        raise ModelError(
            f"{key}: {part} may mean {len(meant)} modules of {type(model).__name__}; allowed: a name that only one ends with",
            hint=f"name each that is meant: {', '.join(meant[:_NAMES_SHOWN])}{', ...' if len(meant) > _NAMES_SHOWN else ''}",
        )
    found = parameters_of(model, part)
    if found:
        return found
    modules = [name for name, _ in model.named_modules() if name]
    parts = [name for name in PARTS if parameters_of(model, name)]
    raise ModelError(
        f"{key}: {type(model).__name__} has no part called {part}; allowed: {', '.join([*parts, 'the name of a module'])}",
        hint=did_you_mean(part, [*parts, *modules]),
    )


def _modules(model: nn.Module, part: str) -> list[str]:
    """Name the modules, or single parameters, that a part's name may mean: the one of this very name, or those that end with it."""
    if part in PARTS:
        return []
    names = [name for kind in (model.named_modules(), model.named_parameters()) for name, _ in kind]
    return [part] if part in names else [name for name in names if name.endswith(f".{part}")]


def _is_in(name: str, part: str, model: nn.Module, modules: Sequence[str]) -> bool:
    """Tell whether a parameter is in a part, which is one of a vision-language model or some modules."""
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
            return any(f"{name}.".startswith(f"{module}.") for module in modules)
