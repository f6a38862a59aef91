"""`grpo plan`: what will this recipe need, and will it fit?"""

from typing import Annotated

import typer

from grpo_cli.cli.check import OverridesArgument, RecipeArgument
from grpo_cli.cli.imports import uncollected_imports
from grpo_cli.errors import DOES_NOT_FIT


def plan(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    *,
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus", min=1, help="GPUs that train, over all nodes; those of a vLLM server are not among them."
        ),
    ] = None,
    gpu_memory: Annotated[
        float | None, typer.Option("--gpu-memory", min=0.001, help="Memory of each in GB, as its data sheet says: 80.")
    ] = None,
    tflops: Annotated[
        float | None,
        typer.Option(
            "--gpu-tflops", min=0.001, help="What each reaches in matrix products, in 1e12 operations a second."
        ),
    ] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option("--gpu-bandwidth", min=0.001, help="What each reads from its memory, in 1e12 bytes a second."),
    ] = None,
) -> None:
    """Work out what a run needs, without GPUs and weights: memory by component, work and bottleneck of a step.

    Without --gpus and --gpu-memory the plan is for this machine. Without dataset.max_prompt_length the dataset is read. The README has
    the formulas. The exit code is 6 if the run does not fit, so that a batch script can stop there.

    \b
    Examples:
      grpo plan recipes/quickstart.yaml
      grpo plan recipes/qwen2.5-72b.yaml --gpus 32 --gpu-memory 80
      grpo plan recipes/math.yaml --gpus 8 --gpu-memory 80 train.gradient_checkpointing=true
      grpo plan recipes/math.yaml && grpo train recipes/math.yaml
    """  # noqa: D301  \b keeps the lines apart
    with uncollected_imports():
        from datasets import disable_progress_bars
        from rich.console import Console
        from transformers.utils import logging

        from grpo_cli.engine.continued import begun_adapters, with_adapter_settings
        from grpo_cli.engine.named_parts import check_named_parts
        from grpo_cli.planning.machine import planned_machine
        from grpo_cli.planning.plan import plan_training
        from grpo_cli.planning.report import print_training_plan
        from grpo_cli.recipe.load import load_recipe

    disable_progress_bars()
    logging.disable_progress_bar()
    loaded = with_adapter_settings(load_recipe(recipe, overrides or []))
    begun = begun_adapters(loaded.recipe, loaded.folder, checkpoint=None)
    if begun is not None:
        check_named_parts(loaded.recipe, folder=loaded.folder, begun=begun)
    machine = planned_machine(gpus=gpus, gpu_memory=gpu_memory, tflops=tflops, bandwidth=bandwidth)
    found = plan_training(loaded.recipe, folder=loaded.folder, machine=machine)
    print_training_plan(Console(), found, model=loaded.recipe.model, machine=machine)
    if found.is_too_large(machine):
        raise typer.Exit(DOES_NOT_FIT)
