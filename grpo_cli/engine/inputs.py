"""What sampling and training start from, before their model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_cli.engine.distributed import Processes
from grpo_cli.engine.division import Division, divide
from grpo_cli.engine.held_out import HeldOut
from grpo_cli.engine.prompts import LoadedPrompts
from grpo_cli.engine.run_length import RunLength
from grpo_cli.engine.shared_scoring import Scorer
from grpo_cli.engine.strategies.strategy import Strategy
from grpo_cli.recipe.schema import Recipe
from grpo_cli.types import Prompt
from grpo_cli.vision.processor import VisionProcessor


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingInputs:
    """What a model samples for.

    Attributes:
        recipe: The whole recipe.
        folder: The recipe's folder.
        output_dir: Where files go.
        processes: The processes of this run.
        strategy: How they hold the model.
        tokenizer: The policy's.
        vision: Prepares the images of prompts; None: no dataset has any.
        held_out: The datasets to evaluate on; empty if there are none.
    """

    recipe: Recipe
    folder: Path
    output_dir: Path
    processes: Processes
    strategy: Strategy
    tokenizer: Any
    vision: VisionProcessor | None
    held_out: Sequence[HeldOut]

    @property
    def division(self) -> Division:
        """Which process samples what.

        Raises:
            TrainingError: As `divide` does.
        """
        return divide(self.recipe.vllm, rank=self.processes.rank, processes=self.processes.count)

    @property
    def first_prompt(self) -> Prompt:
        """One of the prompts, with images if there are some."""
        prompts = [prompt for one in self.held_out for prompt in one.prompts]
        return next((prompt for prompt in prompts if prompt.images), prompts[0])

    @property
    def longest_sequence(self) -> int | None:
        """Tokens of the longest prompt and completion that there can be; None: not known."""
        return max(one.longest_sequence(self.recipe.generation) for one in self.held_out)

    @property
    def most_generations(self) -> int:
        """Completions of one prompt that are asked for at once."""
        return max(one.task.settings.num_generations for one in self.held_out)

    @property
    def most_images(self) -> int:
        """Images of one prompt, as far as prompts are known."""
        return max(one.most_images for one in self.held_out)

    def most_completions(self, engines: int) -> int:
        """Count the completions that each of several engines is asked for at once."""
        return max(one.completions(engines) for one in self.held_out)


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs(SamplingInputs):
    """What a training run starts from, loaded and checked before the model.

    Attributes:
        checkpoint: The checkpoint to resume from, if any: the policy is loaded from it.
        prompts: The training prompts.
        scorer: The rewards.
        length: The end of the run.
    """

    checkpoint: Path | None
    prompts: LoadedPrompts
    scorer: Scorer
    length: RunLength

    @property
    def first_prompt(self) -> Prompt:
        """See above: of those that are trained on."""
        return self.prompts.probe

    @property
    def longest_sequence(self) -> int | None:
        """See above."""
        generation = self.recipe.generation
        if self.prompts.longest is None:
            return None
        trained = self.prompts.longest + generation.max_completion_length
        return max([trained, *(one.longest_sequence(generation) for one in self.held_out)])

    @property
    def most_generations(self) -> int:
        """See above."""
        evaluated = [one.task.settings.num_generations for one in self.held_out]
        return max([self.recipe.grpo.num_generations, *evaluated])

    @property
    def most_images(self) -> int:
        """See above."""
        return max([self.prompts.most_images, *(one.most_images for one in self.held_out)])

    def most_completions(self, engines: int) -> int:
        """See above."""
        grpo = self.recipe.grpo
        prompts = math.ceil(self.recipe.train.prompts_per_step * grpo.steps_per_generation / engines)
        return max([prompts * grpo.num_generations, *(one.completions(engines) for one in self.held_out)])
