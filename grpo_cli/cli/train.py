"""`grpo train`: run a recipe."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from grpo_cli.cli.check import OverridesArgument, RecipeArgument
from grpo_cli.cli.imports import uncollected_imports
from grpo_cli.cli.slurm_step import join_slurm_step


def train(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    *,
    resume: Annotated[
        str | None,
        typer.Option(
            help="Continue a run: alone, from the newest complete checkpoint in train.output_dir (from the beginning if there is "
            "none); or from the checkpoint or run directory PATH.",
            metavar="[PATH]",
            show_default=False,
        ),
    ] = None,
    nproc: Annotated[
        int, typer.Option("--nproc", min=1, help="Processes to train in, on this machine; one per GPU is usual.")
    ] = 1,
) -> None:
    """Train a model as a recipe says. The recipe is checked completely before anything is loaded.

    Ctrl-C and SIGTERM save a checkpoint and exit with 130 and 143; --resume continues from there, with the same result as if
    the run had never stopped.

    Under `accelerate launch`, `torchrun` and `srun` the command joins the processes that were launched; --nproc launches them itself.

    \b
    Examples:
      grpo train recipes/quickstart.yaml
      grpo train recipes/tldr.yaml train.learning_rate=2e-6 train.output_dir=runs/tldr-2e-6
      grpo train recipes/tldr.yaml --resume
      grpo train recipes/tldr.yaml --nproc 8
      grpo train recipes/tldr.yaml --resume runs/tldr/checkpoints/step-000100
    """  # noqa: D301  \b keeps the lines apart
    from grpo_cli.recipe.load import load_recipe

    join_slurm_step()
    loaded = load_recipe(recipe, overrides or [], resumes=resume is not None)

    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if nproc > 1 and launched == 1:
        with uncollected_imports():
            from grpo_cli.engine.launch import launch
        raise typer.Exit(launch(nproc, sys.argv[1:]))
    if nproc not in {1, launched}:
        raise typer.BadParameter(f"{launched} processes were launched already", param_hint="--nproc")

    with uncollected_imports():
        from grpo_cli.engine.run import run
    run(loaded, resume=resume)


def with_resume_value(arguments: Sequence[str]) -> list[str]:
    """Spell a `--resume` without a path as `--resume=newest`; Typer's options cannot leave their value out.

    What follows is its path unless it is another option, an override (`key=value` that is no existing path), or nothing.
    """
    spelled = list(arguments)
    for position, argument in enumerate(spelled):
        if argument != "--resume":
            continue
        following = spelled[position + 1] if position + 1 < len(spelled) else "-"
        is_override = "=" in following and not Path(following).exists()
        if following.startswith("-") or is_override:
            spelled[position] = "--resume=newest"
    return spelled
