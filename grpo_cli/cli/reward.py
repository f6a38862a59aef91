"""`grpo reward test`: what do this recipe's rewards say of these completions?"""

from pathlib import Path
from typing import Annotated

import typer

from grpo_cli.cli.check import OverridesArgument, RecipeArgument
from grpo_cli.cli.imports import uncollected_imports

reward = typer.Typer(no_args_is_help=True, help="Try the rewards of a recipe.", rich_markup_mode=None)


@reward.callback()
def _reward() -> None:
    """Try the rewards of a recipe."""


@reward.command(name="test")
def try_rewards(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    *,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="A completion file of a run, such as runs/math/completions/train-000010.parquet.",
            metavar="FILE",
        ),
    ] = None,
    texts: Annotated[
        list[str] | None, typer.Option("--text", help="A completion; may be given several times.", metavar="TEXT")
    ] = None,
    row: Annotated[int, typer.Option("--row", min=0, help="The dataset row that --text completes.")] = 0,
    step: Annotated[
        int, typer.Option("--step", min=0, help="Optimizer steps that the functions are told are done.")
    ] = 0,
) -> None:
    """Score completions with a recipe's rewards, without a model: each reward, what the functions took, and where they failed.

    The functions are called as in training, with the columns of the recipe's dataset. Exits with 3 if one of them failed on a prompt.

    \b
    Examples:
      grpo reward test recipes/quickstart.yaml --text "Paris." --text "The capital of France is Paris."
      grpo reward test recipes/math.yaml --row 17 --text "The answer is \\boxed{42}."
      grpo reward test recipes/math.yaml --from runs/math/completions/train-000010.parquet
    """  # noqa: D301  \b keeps the lines apart
    if (source is None) == (not texts):
        raise typer.BadParameter("one of --from and --text says which completions to score")
    with uncollected_imports():
        from datasets import disable_progress_bars
        from rich.console import Console

        from grpo_cli.engine.reward_trial import SavedCompletion, saved_completions, score_completions
        from grpo_cli.errors import RewardError
        from grpo_cli.recipe.load import load_recipe
        from grpo_cli.telemetry.reward_table import print_reward_table

    disable_progress_bars()
    loaded = load_recipe(recipe, overrides or [])
    if source is not None:
        completions = saved_completions(source)
    else:
        completions = [SavedCompletion(row=row, prompt=None, text=text) for text in texts or []]
    trial = score_completions(loaded, completions, step=step)
    console = Console()
    for line in trial.descriptions:
        console.print(line, markup=False, highlight=False)
    print_reward_table(console, trial.scored, trial.names, trial.weights, trial.metrics)
    for line in trial.problems:
        console.print(line, markup=False, highlight=False)
    if trial.problems:
        raise RewardError(
            f"reward functions failed: {len(trial.problems)} {'problem' if len(trial.problems) == 1 else 'problems'}"
        )
