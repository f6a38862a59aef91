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


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """What a resumed run has behind it.

    Attributes:
        steps: Optimizer steps, those that are left in the present rollout window counted as done.
        prompts: Prompts drawn.
    """

    steps: int = 0
    prompts: int = 0


def run_length(train: TrainSection, grpo: GrpoSection, *, rows: int | None, done: Done | None = None) -> RunLength:
    """Compute the end of a run.

    An epoch draws every row once. The last generation takes the prompts that are left, so no row is dropped and none is drawn
    twice.

    Args:
        train: `max_steps`, `num_train_epochs` and `prompts_per_step`.
        grpo: `steps_per_generation` and `num_iterations`.
        rows: Usable rows of the dataset; None: unknown, it is streamed.
        done: What a resumed run has behind it; the rest goes by the present recipe.

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
    done = done or Done()
    prompts = math.ceil(rows * train.num_train_epochs)
    left = max(0, prompts - done.prompts)
    generations, remainder = divmod(left, train.prompts_per_step * grpo.steps_per_generation)
    steps = generations * grpo.steps_per_generation + math.ceil(remainder / train.prompts_per_step)
    return RunLength(total_steps=done.steps + steps * grpo.num_iterations, total_prompts=prompts)
