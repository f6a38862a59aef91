"""`train:` the loop, the optimizer and what is kept on disk."""

from dataclasses import dataclass
from typing import Literal

from grpo_cli.recipe.schema.option import option


@dataclass(kw_only=True)
class TrainSection:
    """Length of the run, optimizer, precision, checkpoints."""

    output_dir: str = option(
        "runs/${run_name}", non_empty=True, help="Where the run's files go. `${run_name}` is the recipe's file name."
    )
    overwrite_output_dir: bool = option(
        False,
        help="Remove the run that `output_dir` already holds and start over. Without it such a run is only continued.",
    )
    seed: int = option(42, minimum=0, maximum=2**63 - 1, help="Seed of everything random.")
    prompts_per_step: int = option(
        8,
        minimum=1,
        help="Prompts of one optimizer step, over all processes; each gets `grpo.num_generations` completions.",
    )
    micro_batch_tokens: int | None = option(
        None,
        minimum=1,
        help="Most tokens in one forward and backward. Changes speed and memory, not the result. Left out: found from the free memory. "
        "It is halved whenever a micro-batch does not fit.",
    )
    max_steps: int | None = option(None, minimum=1, help="Optimizer steps; overrides `num_train_epochs`.")
    num_train_epochs: float = option(1.0, above=0, help="Passes over the dataset.")
    learning_rate: float = option(1e-6, minimum=0, help="Peak learning rate of AdamW.")
    learning_rates: dict[str, float] = option(
        factory=dict,
        help="Peak learning rates of parts of the model that have one of their own, named as in `model.freeze`, such as "
        "`{vision_tower: 2.0e-6, projector: 1.0e-5}`.",
    )
    lr_scheduler_type: Literal["constant", "constant_with_warmup", "linear", "cosine", "polynomial", "inverse_sqrt"] = (
        option("linear", help="Learning-rate schedule.")
    )
    warmup_steps: int = option(0, minimum=0, help="Steps over which the learning rate rises from 0.")
    warmup_ratio: float = option(0.0, minimum=0, below=1, help="The same as a share of all steps.")
    weight_decay: float = option(0.0, minimum=0, help="AdamW weight decay, not on biases and norms.")
    adam_beta1: float = option(0.9, minimum=0, below=1, help="AdamW beta1.")
    adam_beta2: float = option(0.999, minimum=0, below=1, help="AdamW beta2.")
    adam_epsilon: float = option(1e-8, above=0, help="AdamW epsilon.")
    max_grad_norm: float = option(1.0, minimum=0, help="Clip the gradient to this norm; 0 does not clip.")
    bf16: bool = option(False, help="Compute in bfloat16 (autocast). On CPUs without bf16 units this is slower.")
    gradient_checkpointing: Literal[True, False, "selective"] = option(
        "selective",
        help="What the backward computes again instead of keeping it. `true`: all of each layer, for the least memory and a third "
        "more arithmetic; `selective`: only what costs next to nothing, for less than half the memory of `false`.",
    )
    save_steps: int = option(
        100, minimum=0, help="Steps between checkpoints; 0 saves only at the end or when interrupted."
    )
    keep_checkpoints: int = option(3, minimum=1, help="Checkpoints to keep; the best one is kept besides.")
