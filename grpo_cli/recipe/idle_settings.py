"""Settings that somebody made and that the rest of the recipe leaves without effect. A default is never one of them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from grpo_cli.recipe.finding import Finding
from grpo_cli.recipe.kinds import default_of, fields_of, show
from grpo_cli.recipe.objective_rules import CLIPPING_LOSSES, corrects_rollouts
from grpo_cli.recipe.schema import Recipe

_LOSSES_THAT_READ: Mapping[str, tuple[str, ...]] = {
    "epsilon": CLIPPING_LOSSES,
    "epsilon_high": (*CLIPPING_LOSSES, "cispo"),
    "sapo_temperature_pos": ("sapo",),
    "sapo_temperature_neg": ("sapo",),
    "vespo_k_pos": ("vespo",),
    "vespo_lambda_pos": ("vespo",),
    "vespo_k_neg": ("vespo",),
    "vespo_lambda_neg": ("vespo",),
}


def changed(section: Any, names: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Give the settings of a section that are not at their default: name, value in words, and a hint that leads back."""
    fields = fields_of(type(section))
    for name in names:
        value, default = getattr(section, name), default_of(fields[name])
        if value != default:
            yield name, _show(value), f"leave the key out, or set it to its default, {_show(default)}"


def _show(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else show(value)


def idle(
    section: Any, names: Iterable[str], *, prefix: str, beside: str, reason: str, needed: str
) -> Iterator[Finding]:
    """Find the settings of a section that are not at their default although nothing reads them.

    Args:
        section: Has the settings.
        names: Of those that nothing reads.
        prefix: Key of the section.
        beside: Key of the setting that leaves them without effect.
        reason: Why nothing reads them.
        needed: Setting with which something does.
    """
    for name, value, hint in changed(section, names):
        yield Finding(
            keys=(f"{prefix}.{name}", beside),
            message=f"found {value}, but {reason}; allowed with {needed}",
            hint=hint,
        )


def loss_reads_its_constants(recipe: Recipe) -> Iterable[Finding]:
    """Every objective has constants of its own."""
    loss = recipe.grpo.loss_type
    unread = [name for name, losses in _LOSSES_THAT_READ.items() if loss not in losses]
    for name, value, hint in changed(recipe.grpo, unread):
        yield Finding(
            keys=(f"grpo.{name}", "grpo.loss_type"),
            message=f"found {value}, but loss_type {loss} does not use it; allowed with "
            f"{', '.join(_LOSSES_THAT_READ[name])}",
            hint=hint,
        )


def rewards_are_scaled_as_told(recipe: Recipe) -> Iterable[Finding]:
    """GDPO divides by the deviation of the step, whatever the scale is."""
    grpo = recipe.grpo
    if grpo.multi_objective_aggregation == "normalize_then_sum" and grpo.scale_rewards != "group":
        yield Finding(
            keys=("grpo.scale_rewards", "grpo.multi_objective_aggregation"),
            message=f"found {grpo.scale_rewards}, but multi_objective_aggregation normalize_then_sum scales by each group and then "
            "by the whole step, and does not use it; allowed with sum_then_normalize",
            hint="leave the key out, or set it to its default, group",
        )


def moving_reference_is_on(recipe: Recipe) -> Iterable[Finding]:
    """How the reference moves is said only where it does."""
    if recipe.grpo.sync_ref_model:
        return
    yield from idle(
        recipe.grpo,
        ("ref_model_mixup_alpha", "ref_model_sync_steps"),
        prefix="grpo",
        beside="grpo.sync_ref_model",
        reason="the reference does not move",
        needed="`grpo.sync_ref_model: true`",
    )


def policy_can_drift(recipe: Recipe) -> Iterable[Finding]:
    """A batch of completions that is used for one step is off-policy only by what a rollout correction measures."""
    grpo = recipe.grpo
    once = grpo.steps_per_generation * grpo.num_iterations == 1
    if grpo.off_policy_mask_threshold is not None and once and not corrects_rollouts(recipe):
        yield Finding(
            keys=("grpo.off_policy_mask_threshold", "grpo.steps_per_generation", "grpo.num_iterations"),
            message=f"found {grpo.off_policy_mask_threshold:g}, but each generation is used for one step, so that nothing drifts; "
            "allowed with steps_per_generation or num_iterations above 1",
            hint="leave the key out, or set it to its default, null",
        )


IDLE_CHECKS: tuple[Callable[[Recipe], Iterable[Finding]], ...] = (
    loss_reads_its_constants,
    rewards_are_scaled_as_told,
    moving_reference_is_on,
    policy_can_drift,
)
