"""What a recipe names of its model: is it there? Asked of the model's configuration, before anything large is loaded."""

from pathlib import Path
from typing import Any

from grpo_cli.errors import ModelError
from grpo_cli.policy.adapter_sizes import check_layers
from grpo_cli.policy.adapters import attach_adapters
from grpo_cli.policy.load import load_begun, load_shapes
from grpo_cli.policy.parts import freeze, learning_rates
from grpo_cli.recipe.schema import Recipe


def check_named_parts(recipe: Recipe, *, folder: Path, begun: Path | None = None) -> None:
    """Look up the parts that `model.freeze`, `model.lora` and `train.learning_rates` name.

    A model that cannot be made of its configuration alone is passed over: it is looked at when it is loaded.

    Args:
        recipe: The whole recipe, with what the adapters say that it goes on from.
        folder: Its folder.
        begun: Folder of those adapters; None: there are none, or they have been trained further.

    Raises:
        ModelError: If the model has no such part, or the adapters do not fit it.
    """
    if recipe.model.lora is None and not recipe.model.freeze and not recipe.train.learning_rates:
        return
    try:
        model = load_shapes(recipe.model, folder=folder)
    except ModelError:
        return
    if begun is not None:
        check_layers(model, begun, key="model.name_or_path", name=recipe.model.name_or_path)
    put_parts(model, recipe)
    if begun is not None:
        load_begun(model, begun)


def put_parts(model: Any, recipe: Recipe) -> None:
    """Freeze parts of a model without weights, and put new adapters on it, as the recipe says.

    Raises:
        ModelError: If it names a part that the model does not have.
    """
    frozen = freeze(model, recipe.model.freeze)
    if recipe.model.lora is not None:
        attach_adapters(model, recipe.model.lora, frozen=frozen)
    learning_rates(model, recipe.train.learning_rates)
