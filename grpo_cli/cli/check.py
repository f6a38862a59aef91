"""`grpo check`: is the recipe fine?"""

from pathlib import Path
from typing import Annotated

import typer

RecipeArgument = Annotated[Path, typer.Argument(help="The recipe, a YAML file.", metavar="RECIPE", show_default=False)]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(help="Changes to the recipe, such as grpo.beta=0.04.", metavar="[KEY=VALUE]...", show_default=False),
]


def check(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    *,
    show: Annotated[bool, typer.Option("--print", help="Print the recipe with every default filled in.")] = False,
) -> None:
    """Check a recipe without loading anything; report every problem at once, and exit with 2 if there is one.

    Names of a model's parts (model.freeze, model.lora, train.learning_rates) are looked up in its configuration by `grpo plan`, and by
    `grpo train` before it loads anything else.

    \b
    Examples:
      grpo check recipes/quickstart.yaml
      grpo check recipes/quickstart.yaml grpo.loss_type=dr_grpo "rewards.reward_weights=[1, 0.5]"
      grpo check recipes/quickstart.yaml vllm.mode=colocate
      grpo check --print recipes/quickstart.yaml > resolved.yaml
    """  # noqa: D301  \b keeps the lines apart
    from grpo_cli.recipe.load import dump_recipe, load_recipe
    from grpo_cli.recipe.notices import missing_engine
    from grpo_cli.recipe.overlooked_images import overlooked_in_files
    from grpo_cli.recipe.summary import summary

    loaded = load_recipe(recipe, overrides or [])
    if show:
        typer.echo(dump_recipe(loaded.recipe), nl=False)
        return
    typer.echo(f"recipe is fine: {recipe}\n{summary(loaded.recipe)}")
    missing = missing_engine(loaded.recipe)
    overlooked = overlooked_in_files(loaded.recipe, loaded.folder)
    for notice in (*loaded.notices, *([missing] if missing else []), *overlooked):
        typer.echo(f"notice: {notice}")
