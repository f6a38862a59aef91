"""How many optimizer steps a run has."""

import math
from dataclasses import dataclass

from grpo_cli.errors import DataError
from grpo_cli.recipe.schema import GrpoSection, TrainSection


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLength:
    """The end of a run.

    Attributes:
        total_steps: Optimizer steps.
        total_prompts: Prompts drawn, if the run is measured in epochs; None: steps alone end it.
    """

    total_steps: int
    total_prompts: int | None


def run_length(train: TrainSection, grpo: GrpoSection, *, rows: int | None) -> RunLength:
    """Compute the end of a run.

    An epoch draws every row once. The last generation takes the prompts that are left, so no row is dropped and none is drawn
    twice.

    Args:
        train: `max_steps`, `num_train_epochs` and `prompts_per_step`.
        grpo: `steps_per_generation` and `num_iterations`.
        rows: Usable rows of the dataset; None: unknown, it is streamed.

    Raises:
        DataError: If there are fewer rows than prompts in a step, or epochs are asked of a stream.
    """
    if rows is not None and rows < train.prompts_per_step:
        raise DataError(
            f"dataset: {rows} usable rows, but train.prompts_per_step is {train.prompts_per_step}",
            hint=f"lower train.prompts_per_step to {rows} or less, or use more rows"
            if rows
            else "every row was left out",
        )
    if train.max_steps is not None:
        return RunLength(total_steps=train.max_steps, total_prompts=None)
    if rows is None:
        raise DataError(
            "dataset.streaming: the number of rows is unknown, so epochs cannot end", hint="set train.max_steps"
        )
    prompts = math.ceil(rows * train.num_train_epochs)
    generations, remainder = divmod(prompts, train.prompts_per_step * grpo.steps_per_generation)
    steps = generations * grpo.steps_per_generation + math.ceil(remainder / train.prompts_per_step)
    return RunLength(total_steps=steps * grpo.num_iterations, total_prompts=prompts)
