"""`grpo eval`: how good is a model, and is another one better?"""

import os
from pathlib import Path
from typing import Annotated

import typer

from grpo_cli.cli.check import OverridesArgument, RecipeArgument
from grpo_cli.cli.imports import uncollected_imports

ModelOption = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="A run directory (its final model, or else its best or newest checkpoint), a checkpoint, a folder of a model or of "
        "adapters, or a hub id; `final`, `best` and step-000100 mean those of this recipe's run. Can be repeated: all are compared "
        "with the first. [default: the recipe's model]",
        show_default=False,
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output",
        metavar="DIR",
        help="Where results go, a folder for each model. [default: `evaluations` in train.output_dir]",
        show_default=False,
    ),
]


def evaluate(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    *,
    model: ModelOption = None,
    output: OutputOption = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start over where these models were evaluated before.")
    ] = False,
) -> None:
    """Evaluate models on the held-out rows of a recipe (`eval:`), with its rewards and its engine; nothing is trained.

    Tells the mean of each reward, avg@k, pass@k and maj@k where it is known which completions are correct, length and truncation, with 95 %
    intervals, and paired differences between models. All completions are kept as parquet. Run again, it goes on where it was stopped.

    \b
    Examples:
      grpo eval recipes/math.yaml
      grpo eval recipes/math.yaml eval.dataset.max_rows=50
      grpo eval recipes/math.yaml --model runs/math/final eval.num_generations=16 eval.temperature=0.7
      grpo eval recipes/math.yaml --model Qwen/Qwen2.5-1.5B-Instruct --model runs/math
      grpo eval recipes/math.yaml --model best vllm.mode=server vllm.start=true
    """  # noqa: D301  \b keeps the lines apart
    from grpo_cli.errors import Problem, RecipeError, TrainingError
    from grpo_cli.recipe.eval_tasks import evaluation_tasks
    from grpo_cli.recipe.load import load_recipe

    loaded = load_recipe(recipe, overrides or [])
    if not evaluation_tasks(loaded.recipe):
        raise RecipeError(
            [
                Problem(
                    where=str(recipe),
                    key="eval.dataset",
                    message="not set; required by `grpo eval`",
                    hint="name the held-out rows there, or several datasets in `eval.datasets`",
                )
            ]
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise TrainingError(
            f"`grpo eval` runs in one process; {os.environ['WORLD_SIZE']} were launched (WORLD_SIZE)",
            hint="start it without a launcher; with vllm.mode: server, vLLM spreads over GPUs (vllm.tensor_parallel_size)",
        )
    with uncollected_imports():
        from grpo_cli.engine.evaluate import evaluate as evaluate_models
        from grpo_cli.engine.evaluated_model import evaluated_models

    models = evaluated_models(model or [], loaded)
    folder = output or Path(loaded.recipe.train.output_dir) / "evaluations"
    evaluate_models(loaded, models, output=folder.expanduser().resolve(), overwrite=overwrite)
