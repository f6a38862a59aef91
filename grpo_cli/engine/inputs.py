"""What a run starts from, before its model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_cli.engine.distributed import Processes
from grpo_cli.engine.prompts import HeldOutPrompts, LoadedPrompts
from grpo_cli.engine.run_length import RunLength
from grpo_cli.engine.shared_scoring import Scorer
from grpo_cli.engine.state import RunState
from grpo_cli.engine.strategies.strategy import Strategy
from grpo_cli.recipe.schema import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """What a run starts from, loaded and checked before the model.

    Attributes:
        recipe: The whole recipe.
        folder: The recipe's folder.
        output_dir: The run directory.
        checkpoint: The checkpoint to resume from, if any: the policy is loaded from it.
        state: The run state of that checkpoint.
        processes: The processes of this run.
        strategy: How they train together.
        tokenizer: The policy's.
        prompts: The training prompts.
        held_out: Held-out prompts; empty if there are none.
        scorer: The rewards.
        length: The end of the run.
    """

    recipe: Recipe
    folder: Path
    output_dir: Path
    checkpoint: Path | None
    state: RunState | None
    processes: Processes
    strategy: Strategy
    tokenizer: Any
    prompts: LoadedPrompts
    held_out: HeldOutPrompts
    scorer: Scorer
    length: RunLength
