"""A recipe that goes on from trained adapters, with what these say put where the recipe says nothing."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from grpo_cli.engine.export import MODEL_FOLDER, REFERENCE_FOLDER
from grpo_cli.engine.model_folder import model_folder
from grpo_cli.errors import CheckpointError, ModelError
from grpo_cli.policy.adapter_settings import (
    CONFIG_FILE,
    adapters_folder,
    check_weights,
    read_adapter_settings,
)
from grpo_cli.policy.adapter_sizes import check_layers
from grpo_cli.policy.adapter_targets import target_layers
from grpo_cli.policy.load import load_shapes
from grpo_cli.policy.parts import freeze
from grpo_cli.policy.quantization import QUANTIZATION_FILE, with_quantization
from grpo_cli.policy.weights_below import other_base
from grpo_cli.policy.whole_modules import whole_modules
from grpo_cli.recipe.kinds import bare, show
from grpo_cli.recipe.load import LoadedRecipe
from grpo_cli.recipe.schema import LoraSection, ModelSection, Recipe

_KEY = "model.lora.adapter_name_or_path"

_OWN = ("r", "alpha", "use_rslora", "use_dora", "target_modules", "modules_to_save")
"""Keys of `model.lora` that adapters decide themselves."""


def begun_folder(name_or_path: str, folder: Path) -> Path:
    """Find the adapters that `model.lora.adapter_name_or_path` names: a folder of them, a checkpoint, a run directory, or a hub id.

    Args:
        name_or_path: What it says. Of a run directory its final model is meant, or else its newest checkpoint.
        folder: The recipe's folder.

    Raises:
        ModelError: If there are none.
    """
    found = adapters_folder(name_or_path, folder)
    try:
        place = model_folder(found)
    except CheckpointError as error:
        raise ModelError(
            f"{_KEY}: {found} holds no adapters",
            hint=f"name a folder with {CONFIG_FILE}, a checkpoint, or the train.output_dir of a run that has trained adapters",
        ) from error
    if not (place / CONFIG_FILE).is_file():
        raise ModelError(
            f"{_KEY}: {place} holds a whole model, and no adapters",
            hint="name it as model.name_or_path to go on from it",
        )
    return place


def keeps_reference(recipe: Recipe) -> bool:
    """Tell whether the reference is the model with the adapters that the run goes on from."""
    lora = recipe.model.lora
    return recipe.grpo.beta != 0.0 and lora is not None and lora.adapter_name_or_path is not None


def begun_adapters(recipe: Recipe, folder: Path, *, checkpoint: Path | None) -> Path | None:
    """Find the adapters that a run has gone on from.

    Args:
        recipe: The whole recipe.
        folder: Its folder.
        checkpoint: What the run is resumed from; None: it begins.

    Returns:
        None if there are none, or they are not needed any more.

    Raises:
        ModelError: If they are needed, and not found.
    """
    lora = recipe.model.lora
    if lora is None or lora.adapter_name_or_path is None:
        return None
    if checkpoint is not None:
        if not keeps_reference(recipe):
            return None
        # Where the run began may have changed, or be gone; checkpoints of older versions do not hold it.
        kept = checkpoint / REFERENCE_FOLDER
        if kept.is_dir():
            return kept.resolve()
    return begun_folder(lora.adapter_name_or_path, folder)


def with_adapter_settings(loaded: LoadedRecipe, *, checkpoint: Path | None = None) -> LoadedRecipe:
    """Say in `model.lora` what the adapters of `model.lora.adapter_name_or_path` are like; other recipes pass through untouched.

    Notices say where they may have been trained on another model, where on other rounded weights, and where on fewer layers than the
    recipe names.

    Args:
        loaded: The recipe.
        checkpoint: Of a run that went on from them, whose own adapters say the same; None: there is none.

    Raises:
        ModelError: If they are not found, are of a kind that is not known here, were trained on other weights, or the recipe contradicts
            them.
    """
    model = loaded.recipe.model
    if model.lora is None or model.lora.adapter_name_or_path is None:
        return loaded
    name = model.lora.adapter_name_or_path
    own = None if checkpoint is None else checkpoint / MODEL_FOLDER
    place = own if own is not None and (own / CONFIG_FILE).is_file() else begun_folder(name, loaded.folder)
    settings = read_adapter_settings(place)
    check_weights(place)
    found = settings.lora
    for key in _OWN:
        asked, there = getattr(model.lora, key), getattr(found, key)
        if _is_chosen(loaded, key) and not (_agree(asked, there) or _mean_the_same(key, asked, there, loaded)):
            raise ModelError(
                f"model.lora.{key}: found {show(asked)}; the adapters of {name} have {show(there)}",
                hint=f"leave model.lora.{key} out, and theirs is taken",
            )
    told = [*_other_rounding(model, place)]
    if checkpoint is None:  # else its run has been told, and the weights are compared where it is resumed
        base = other_base(place, model, loaded.folder, key="model.name_or_path")
        told = [*([] if base is None else [base]), *told]
    if _is_chosen(loaded, "target_modules"):
        told += _fewer_layers(model, found, place, loaded.folder)
    lora = replace(found, dropout=model.lora.dropout, adapter_name_or_path=name)
    recipe = replace(loaded.recipe, model=replace(model, lora=lora))
    return replace(loaded, recipe=recipe, notices=(*loaded.notices, *(f"{_KEY}: {line}" for line in told)))


def _other_rounding(model: ModelSection, place: Path) -> Iterator[str]:
    """Say if the weights below were rounded in another way than the recipe's will be, as far as that is known."""
    if not (place / QUANTIZATION_FILE).is_file():
        return
    then = with_quantization(model, place)
    for key in ("quantization", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant"):
        before, now = getattr(then, key), getattr(model, key)
        if before != now:
            yield f"they were trained with model.{key}: {bare(before)}; the recipe's is {bare(now)}"
            return


def _fewer_layers(model: ModelSection, found: LoraSection, place: Path, folder: Path) -> Iterator[str]:
    """Say if the recipe names all linear layers, and adapters are on some of them only."""
    assert model.lora is not None
    if model.lora.target_modules != LoraSection().target_modules:
        return
    shapes = load_shapes(model, folder=folder)
    check_layers(shapes, place, key="model.name_or_path", name=model.name_or_path)
    whole = whole_modules(shapes, found.modules_to_save)
    everything = target_layers(shapes, model.lora.target_modules, frozen=freeze(shapes, model.freeze), whole=whole)
    theirs = target_layers(shapes, found.target_modules)
    if set(everything) - set(theirs):
        yield f"they are on {len(theirs)} layers, and all-linear would be {len(everything)}; those are trained that have some"


def _is_chosen(loaded: LoadedRecipe, key: str) -> bool:
    """Tell whether the recipe says it; the keys of a list's elements are those of the list."""
    whole = f"model.lora.{key}"
    return any(one == whole or one.startswith(f"{whole}[") for one in loaded.chosen)


def _mean_the_same(key: str, asked: list[str], there: list[str], loaded: LoadedRecipe) -> bool:
    """Compare names of modules that are trained whole, where what they mean depends on the model."""
    if key != "modules_to_save":
        return False
    shapes = load_shapes(loaded.recipe.model, folder=loaded.folder)
    return set(whole_modules(shapes, asked)) == set(whole_modules(shapes, there))


def _agree(asked: object, there: object) -> bool:
    """Compare two values; of names of layers the ends may be given."""
    if not isinstance(asked, Sequence) or not isinstance(there, Sequence):
        return asked == there
    if list(asked) == LoraSection().target_modules:  # what all means depends on the model
        return True
    pairs = [(mine, theirs) for mine in asked for theirs in there if f".{theirs}".endswith(f".{mine}")]
    return {mine for mine, _ in pairs} == set(asked) and {theirs for _, theirs in pairs} == set(there)
