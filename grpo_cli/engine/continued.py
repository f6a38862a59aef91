"""A recipe that goes on from trained adapters, with what these say put where the recipe says nothing."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from grpo_cli.engine.export import MODEL_FOLDER
from grpo_cli.errors import ModelError
from grpo_cli.policy.adapter_settings import (
    CONFIG_FILE,
    AdapterSettings,
    adapters_folder,
    check_weights,
    read_adapter_settings,
)
from grpo_cli.policy.adapter_targets import target_layers
from grpo_cli.policy.load import load_shapes
from grpo_cli.policy.parts import freeze
from grpo_cli.policy.quantization import QUANTIZATION_FILE, with_quantization
from grpo_cli.recipe.kinds import show
from grpo_cli.recipe.load import LoadedRecipe
from grpo_cli.recipe.schema import LoraSection, ModelSection

_KEY = "model.lora.adapter_name_or_path"

_OWN = ("r", "alpha", "use_rslora", "use_dora", "target_modules", "modules_to_save")
"""Keys of `model.lora` that adapters decide themselves."""


def with_adapter_settings(loaded: LoadedRecipe, *, checkpoint: Path | None = None) -> LoadedRecipe:
    """Say in `model.lora` what the adapters of `model.lora.adapter_name_or_path` are like; other recipes pass through untouched.

    Notices say where they were trained on another model, on other rounded weights, or on fewer layers than the recipe names.

    Args:
        loaded: The recipe.
        checkpoint: Of a run that went on from them, whose own adapters say the same; None: there is none.

    Raises:
        ModelError: If they are not found, are of a kind that is not known here, or the recipe contradicts them.
    """
    model = loaded.recipe.model
    if model.lora is None or model.lora.adapter_name_or_path is None:
        return loaded
    name = model.lora.adapter_name_or_path
    own = None if checkpoint is None else checkpoint / MODEL_FOLDER
    place = own if own is not None and (own / CONFIG_FILE).is_file() else adapters_folder(name, loaded.folder)
    settings = read_adapter_settings(place)
    check_weights(place)
    found = settings.lora
    for key in _OWN:
        asked, there = getattr(model.lora, key), getattr(found, key)
        if _is_chosen(loaded, key) and not _agree(asked, there):
            raise ModelError(
                f"model.lora.{key}: found {asked}; the adapters of {name} have {there}",
                hint=f"leave model.lora.{key} out, and theirs is taken",
            )
    told = [*_other_base(model, settings), *_other_rounding(model, place)]
    if _is_chosen(loaded, "target_modules"):
        told += _fewer_layers(model, found, loaded.folder)
    lora = replace(found, dropout=model.lora.dropout, adapter_name_or_path=name)
    recipe = replace(loaded.recipe, model=replace(model, lora=lora))
    return replace(loaded, recipe=recipe, notices=(*loaded.notices, *(f"{_KEY}: {line}" for line in told)))


def _other_base(model: ModelSection, found: AdapterSettings) -> Iterator[str]:
    """Say if adapters name another model than the recipe, which may still be the same one in another place."""
    if found.base is None:
        return
    if found.base != model.name_or_path and not _is_same_place(found.base, model.name_or_path):
        yield f"they were trained on {found.base}; model.name_or_path is {model.name_or_path}"
    elif found.revision is not None and found.revision != model.revision:
        yield f"they were trained on revision {found.revision}; model.revision is {show(model.revision)}"


def _is_same_place(one: str, other: str) -> bool:
    return Path(one).exists() and Path(other).exists() and Path(one).samefile(other)


def _other_rounding(model: ModelSection, place: Path) -> Iterator[str]:
    """Say if the weights below were rounded in another way than the recipe's will be, as far as that is known."""
    if not (place / QUANTIZATION_FILE).is_file():
        return
    then = with_quantization(model, place)
    for key in ("quantization", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant"):
        before, now = getattr(then, key), getattr(model, key)
        if before != now:
            yield f"they were trained with model.{key}: {show(before)}; the recipe's is {show(now)}"
            return


def _fewer_layers(model: ModelSection, found: LoraSection, folder: Path) -> Iterator[str]:
    """Say if the recipe names all linear layers, and adapters are on some of them only."""
    assert model.lora is not None
    if model.lora.target_modules != LoraSection().target_modules:
        return
    shapes = load_shapes(model, folder=folder)
    everything = target_layers(shapes, model.lora.target_modules, frozen=freeze(shapes, model.freeze))
    theirs = target_layers(shapes, found.target_modules)
    if set(everything) - set(theirs):
        yield f"they are on {len(theirs)} layers, and all-linear would be {len(everything)}; those are trained that have some"


def _is_chosen(loaded: LoadedRecipe, key: str) -> bool:
    """Tell whether the recipe says it; the keys of a list's elements are those of the list."""
    whole = f"model.lora.{key}"
    return any(one == whole or one.startswith(f"{whole}[") for one in loaded.chosen)


def _agree(asked: object, there: object) -> bool:
    """Compare two values; of names of layers the ends may be given."""
    if not isinstance(asked, Sequence) or not isinstance(there, Sequence):
        return asked == there
    if list(asked) == LoraSection().target_modules:  # what all means depends on the model
        return True
    pairs = [(mine, theirs) for mine in asked for theirs in there if f".{theirs}".endswith(f".{mine}")]
    return {mine for mine, _ in pairs} == set(asked) and {theirs for _, theirs in pairs} == set(there)
