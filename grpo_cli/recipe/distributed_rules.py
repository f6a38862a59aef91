"""Rules across the keys of `distributed:`."""

from collections.abc import Callable, Iterable

from grpo_cli.recipe.finding import Finding
from grpo_cli.recipe.schema import Recipe


def deepspeed_settings_are_read(recipe: Recipe) -> Iterable[Finding]:
    """Settings of DeepSpeed stand beside a strategy that is DeepSpeed's."""
    section = recipe.distributed
    wanted = {
        "offload_optimizer": "deepspeed_zero",
        "offload_params": "deepspeed_zero3",
        "deepspeed_config": "deepspeed_zero",
    }
    for name, strategy in wanted.items():
        value = getattr(section, name)
        if value and not section.strategy.startswith(strategy):
            allowed = (
                "deepspeed_zero3"
                if strategy == "deepspeed_zero3"
                else "deepspeed_zero1, deepspeed_zero2 or deepspeed_zero3"
            )
            yield Finding(
                keys=(f"distributed.{name}", "distributed.strategy"),
                message=f"found {str(value).lower() if value is True else value}, which strategy {section.strategy} does not read; "
                f"allowed: with {allowed}",
                hint="set `strategy: deepspeed_zero3`",
            )


DISTRIBUTED_CHECKS: tuple[Callable[[Recipe], Iterable[Finding]], ...] = (deepspeed_settings_are_read,)
