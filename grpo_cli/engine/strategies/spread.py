"""What each process keeps of a model, by the strategy's name alone: for strategies, and for plans without processes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LIVE_ELEMENTS = 10**9
"""Weights that DeepSpeed leaves whole while others are used, unless its configuration says `stage3_max_live_parameters`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """How a model is spread over processes.

    Attributes:
        name: As `distributed.strategy` calls it.
        weight_parts: Parts that the weights are cut into; a process keeps one. 1: each has all of them.
        gradient_parts: The same of the gradients.
        optimizer_parts: The same of the optimizer's states.
        optimizes_copies: Whether the optimizer moves float32 copies of the weights, in whose precision its states are.
        cuts_weights: Whether a parameter is not what it looks like between two calls of the policy, be it only one part.
        offload_optimizer: Whether the optimizer's states are in main memory instead of the device's.
        offload_params: Whether weights are, and with `fsdp2` gradients and the optimizer's states, too.
        live_elements: Weights that may be whole at once in a forward or backward; None: those of a layer or two.
    """

    name: str
    weight_parts: int = 1
    gradient_parts: int = 1
    optimizer_parts: int = 1
    optimizes_copies: bool = False
    cuts_weights: bool = False
    offload_optimizer: bool = False
    offload_params: bool = False
    live_elements: int | None = None


def spread_of(
    name: str,
    processes: int,
    *,
    offload_optimizer: bool = False,
    offload_params: bool = False,
    live_elements: int = LIVE_ELEMENTS,
) -> Spread:
    """Give what a strategy leaves in each process.

    Args:
        name: As `distributed.strategy` calls it; not `auto`.
        processes: How many there are.
        offload_optimizer: What the recipe says, where the device has a memory of its own.
        offload_params: The same.
        live_elements: With `deepspeed_zero3`, what its configuration says.
    """
    if name == "ddp":
        return Spread(name=name)
    stage = 3 if name == "fsdp2" else int(name[-1])
    return Spread(
        name=name,
        weight_parts=processes if stage > 2 else 1,
        gradient_parts=processes if stage > 1 else 1,
        optimizer_parts=processes,
        optimizes_copies=name != "fsdp2",
        cuts_weights=stage > 2,
        offload_optimizer=offload_optimizer,
        offload_params=offload_params,
        live_elements=live_elements if name == "deepspeed_zero3" else None,
    )


def spread_of_zero(name: str, processes: int, zero: Mapping[str, Any], *, has_own_memory: bool) -> Spread:
    """Give what DeepSpeed leaves in each process.

    Args:
        name: As `distributed.strategy` calls it.
        processes: How many there are.
        zero: The `zero_optimization` of its configuration.
        has_own_memory: Whether the device's memory is not the main memory.
    """
    return spread_of(
        name,
        processes,
        offload_optimizer=has_own_memory and "offload_optimizer" in zero,
        offload_params=has_own_memory and "offload_param" in zero,
        live_elements=int(zero.get("stage3_max_live_parameters", LIVE_ELEMENTS)),
    )
