"""Rules across the keys of `distributed:`."""

from collections.abc import Callable, Iterable

from grpo_cli.recipe.finding import Finding
from grpo_cli.recipe.schema import Recipe

_READ_BY = {
    "offload_optimizer": ("deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3"),
    "offload_params": ("deepspeed_zero3", "fsdp2"),
    "deepspeed_config": ("deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3"),
}
"""Strategies that a setting is for."""


def strategy_reads_its_settings(recipe: Recipe) -> Iterable[Finding]:
    """Settings stand beside a strategy that reads them."""
    section = recipe.distributed
    for name, strategies in _READ_BY.items():
        value = getattr(section, name)
        if not value or section.strategy in strategies:
            continue
        moves_all = section.strategy == "fsdp2" and name == "offload_optimizer"
        yield Finding(
            keys=(f"distributed.{name}", "distributed.strategy"),
            message=f"found {str(value).lower() if value is True else value}, which strategy {section.strategy} does not read; "
            f"allowed: with {', '.join(strategies[:-1])} or {strategies[-1]}",
            hint="set `offload_params`, which moves the optimizer's states, too"
            if moves_all
            else "set `strategy: deepspeed_zero3`",
        )


DISTRIBUTED_CHECKS: tuple[Callable[[Recipe], Iterable[Finding]], ...] = (strategy_reads_its_settings,)
