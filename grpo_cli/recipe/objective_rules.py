"""Rules across the keys of `grpo:`: settings that an objective refuses, and switches without anything to act on."""

from collections.abc import Callable, Iterable

from grpo_cli.recipe.finding import Finding
from grpo_cli.recipe.kinds import show
from grpo_cli.recipe.schema import GrpoSection, Recipe

CLIPPING_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""Objectives with the clipped surrogate: the ones that read `epsilon` and `delta`."""


def corrects_rollouts(recipe: Recipe) -> bool:
    """Tell whether the policy term is weighed by the trainer's over the rollout engine's probabilities."""
    return recipe.vllm.mode is not None and recipe.vllm.importance_sampling_correction


def _upper_epsilon(grpo: GrpoSection) -> float:
    return grpo.epsilon if grpo.epsilon_high is None else grpo.epsilon_high


def cispo_has_a_ceiling(recipe: Recipe) -> Iterable[Finding]:
    """`epsilon_high` means something else to cispo, so its usual default would be wrong by far."""
    if recipe.grpo.loss_type == "cispo" and recipe.grpo.epsilon_high is None:
        yield Finding(
            keys=("grpo.epsilon_high", "grpo.loss_type"),
            message="not set; required with loss_type cispo, where it is the ceiling of the ratio itself, not a distance from 1",
            hint="5 is a usual ceiling",
        )


def cispo_ceiling_lets_the_ratio_through(recipe: Recipe) -> Iterable[Finding]:
    """A ceiling below 1 cuts every token of an unchanged policy."""
    ceiling = recipe.grpo.epsilon_high
    if recipe.grpo.loss_type == "cispo" and ceiling is not None and ceiling < 1:
        yield Finding(
            keys=("grpo.epsilon_high", "grpo.loss_type"),
            message=f"found {ceiling:g}; allowed with loss_type cispo: at least 1, because it is the ceiling of the ratio itself, "
            "and the ratio of an unchanged policy is 1",
            hint="5 is a usual ceiling",
        )


def ratio_level_fits_the_loss(recipe: Recipe) -> Iterable[Finding]:
    """The luspo loss is defined on sequence ratios, vespo makes its own from token ratios."""
    level, keys = recipe.grpo.importance_sampling_level, ("grpo.importance_sampling_level", "grpo.loss_type")
    needed = {"luspo": "sequence", "vespo": "token"}.get(recipe.grpo.loss_type, level)
    if level != needed:
        reason = (
            "it weighs whole completions" if needed == "sequence" else "it forms the sequence weight from them itself"
        )
        yield Finding(
            keys=keys,
            message=f"found {level}; allowed with loss_type {recipe.grpo.loss_type}: {needed}, because {reason}",
            hint=f"set `importance_sampling_level: {needed}`",
        )


def epsilon_can_clip(recipe: Recipe) -> Iterable[Finding]:
    """A ratio is positive: it never falls to 1 - epsilon if that is 0 or less."""
    if recipe.grpo.loss_type in CLIPPING_LOSSES and recipe.grpo.epsilon >= 1:
        yield Finding(
            keys=("grpo.epsilon", "grpo.loss_type"),
            message=f"found {recipe.grpo.epsilon:g}; allowed: below 1, because a ratio cannot fall to 1 - epsilon",
            hint="0.2 is usual",
        )


def delta_can_bind(recipe: Recipe) -> Iterable[Finding]:
    """The two-sided clip belongs to the clipped surrogate, beyond its own range."""
    grpo = recipe.grpo
    if grpo.delta is None:
        return
    if grpo.loss_type not in CLIPPING_LOSSES:
        yield Finding(
            keys=("grpo.delta", "grpo.loss_type"),
            message=f"found {grpo.delta:g}, but loss_type {grpo.loss_type} does not clip; allowed with "
            f"{', '.join(CLIPPING_LOSSES)}",
            hint="leave the key out",
        )
    elif grpo.delta < 1 + _upper_epsilon(grpo):
        upper = "grpo.epsilon" if grpo.epsilon_high is None else "grpo.epsilon_high"
        yield Finding(
            keys=("grpo.delta", upper, "grpo.loss_type"),
            message=f"found {grpo.delta:g}; allowed: at least 1 + {upper}, which is {1 + _upper_epsilon(grpo):g}",
        )


def kl_settings_have_a_kl(recipe: Recipe) -> Iterable[Finding]:
    """Without a KL term there is no estimate to correct and no reference to move."""
    for key in ("use_bias_correction_kl", "sync_ref_model"):
        if getattr(recipe.grpo, key) and recipe.grpo.beta == 0:
            yield Finding(
                keys=(f"grpo.{key}", "grpo.beta"),
                message="found true with beta 0, which has no KL term and loads no reference; allowed: false",
                hint="or set `grpo.beta` above 0",
            )


def reference_can_move(recipe: Recipe) -> Iterable[Finding]:
    """The reference of an adapter is the model without it, which is frozen."""
    if recipe.grpo.sync_ref_model and recipe.model.lora is not None:
        yield Finding(
            keys=("grpo.sync_ref_model", "model.lora"),
            message="found true with model.lora, where the reference is the model without its adapters; allowed: false",
            hint="leave one of them out",
        )


def adapters_have_places(recipe: Recipe) -> Iterable[Finding]:
    """Adapters belong to some layers."""
    lora = recipe.model.lora
    if lora is None:
        return
    if not lora.target_modules or not all(lora.target_modules):
        yield Finding(
            keys=("model.lora.target_modules",),
            message=f"found {show(lora.target_modules)}; allowed: names of layers, at least one",
            hint="leave the key out for all linear layers",
        )
    elif "all-linear" in lora.target_modules and len(lora.target_modules) > 1:
        yield Finding(
            keys=("model.lora.target_modules",),
            message=f"found {show(lora.target_modules)}; allowed: all-linear alone, or names of layers",
        )


def adapters_have_weights_below(recipe: Recipe) -> Iterable[Finding]:
    """Adapters are kept without the model below them, so that it must be one that stays."""
    if recipe.model.random_weights_seed is not None and recipe.model.lora is not None:
        yield Finding(
            keys=("model.random_weights_seed", "model.lora"),
            message=f"found {recipe.model.random_weights_seed} with model.lora, whose adapters would be of use with these weights alone, "
            "which are not kept; allowed: null",
            hint="leave one of them out",
        )


OBJECTIVE_CHECKS: tuple[Callable[[Recipe], Iterable[Finding]], ...] = (
    cispo_has_a_ceiling,
    cispo_ceiling_lets_the_ratio_through,
    ratio_level_fits_the_loss,
    epsilon_can_clip,
    delta_can_bind,
    kl_settings_have_a_kl,
    reference_can_move,
    adapters_have_places,
    adapters_have_weights_below,
)
