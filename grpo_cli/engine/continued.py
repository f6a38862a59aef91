"""A recipe that goes on from trained adapters, with what these say put where the recipe says nothing."""

from collections.abc import Sequence
from dataclasses import replace

from grpo_cli.errors import ModelError
from grpo_cli.policy.adapter_settings import adapters_folder, read_adapter_settings
from grpo_cli.recipe.load import LoadedRecipe
from grpo_cli.recipe.schema import LoraSection

_OWN = ("r", "alpha", "use_rslora", "use_dora", "target_modules", "modules_to_save")
"""Keys of `model.lora` that adapters decide themselves."""


def with_adapter_settings(loaded: LoadedRecipe) -> LoadedRecipe:
    """Say in `model.lora` what the adapters of `model.lora.adapter_name_or_path` are like; other recipes pass through untouched.

    Raises:
        ModelError: If they are not found, are of a kind that is not known here, or the recipe contradicts them.
    """
    model = loaded.recipe.model
    if model.lora is None or model.lora.adapter_name_or_path is None:
        return loaded
    name = model.lora.adapter_name_or_path
    found = read_adapter_settings(adapters_folder(name, loaded.folder)).lora
    for key in _OWN:
        asked, there = getattr(model.lora, key), getattr(found, key)
        if _is_chosen(loaded, key) and not _agree(asked, there):
            raise ModelError(
                f"model.lora.{key}: found {asked}; the adapters of {name} have {there}",
                hint=f"leave model.lora.{key} out, and theirs is taken",
            )
    lora = replace(found, dropout=model.lora.dropout, adapter_name_or_path=name)
    return replace(loaded, recipe=replace(loaded.recipe, model=replace(model, lora=lora)))


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
