"""`distributed:` what several processes keep of a model, and what they share."""

from dataclasses import dataclass
from typing import Literal

from grpo_cli.recipe.schema.option import option


@dataclass(kw_only=True)
class DistributedSection:
    """How weights, gradients and optimizer states are spread over the processes. The result of a run does not depend on it."""

    strategy: Literal["auto", "ddp", "fsdp2", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3"] = option(
        "auto",
        help="`ddp`: every process has everything; `deepspeed_zero1`: a process keeps its part of the optimizer's states; `zero2`: of "
        "the gradients, too; `zero3`: of the weights, too; `fsdp2`: all three, too, with what PyTorch itself has. `auto`: ddp if that fits into a process's memory, else "
        "deepspeed_zero3, or fsdp2 where DeepSpeed is not installed.",
    )
    offload_optimizer: bool = option(
        False, help="deepspeed: keep the optimizer's states in main memory, and compute its steps there."
    )
    offload_params: bool = option(
        False,
        help="deepspeed_zero3: keep the weights in main memory while they are not used. fsdp2: weights, gradients and the optimizer's "
        "states.",
    )
    deepspeed_config: str | None = option(
        None,
        help="deepspeed: JSON file of DeepSpeed's own settings, such as its buckets. What the recipe says is left out there, or `auto`.",
    )
