"""What the stages need to know of the recipe, read out of it: the names are the same."""

import dataclasses
from pathlib import Path

from grpo_cli.engine.run_length import RunLength
from grpo_cli.engine.stages import LoopSettings
from grpo_cli.objective.correction import CorrectionMode, CorrectionSettings
from grpo_cli.objective.loss import ObjectiveSettings
from grpo_cli.objective.ratio import RatioLevel
from grpo_cli.objective.settings import LossType
from grpo_cli.recipe.schema import GenerationSection, GrpoSection, Recipe, VllmSection


def objective_settings(
    grpo: GrpoSection, generation: GenerationSection, vllm: VllmSection, *, router_aux_loss_coef: float
) -> ObjectiveSettings:
    """Read the objective out of the recipe's sections; the names are the same. One default depends on the model."""
    names = {field.name for field in dataclasses.fields(ObjectiveSettings)}
    values = {name: value for name, value in vars(grpo).items() if name in names}
    values |= {
        "loss_type": LossType(grpo.loss_type),
        "importance_sampling_level": RatioLevel(grpo.importance_sampling_level),
        "epsilon_high": grpo.epsilon if grpo.epsilon_high is None else grpo.epsilon_high,
        "max_completion_length": generation.max_completion_length,
        "router_aux_loss_coef": router_aux_loss_coef,
        "correction": correction_settings(vllm),
    }
    return ObjectiveSettings(**values)


def correction_settings(vllm: VllmSection) -> CorrectionSettings | None:
    """Read the rollout correction out of the recipe. The built-in engine needs none: it samples with the trainer's own model."""
    if vllm.mode is None or not vllm.importance_sampling_correction:
        return None
    level, mode = vllm.importance_sampling_mode.split("_")
    return CorrectionSettings(
        level=RatioLevel(level),
        mode=CorrectionMode(mode),
        clip_min=vllm.importance_sampling_clip_min,
        clip_max=vllm.importance_sampling_clip_max,
    )


def loop_settings(recipe: Recipe, *, output_dir: Path, length: RunLength) -> LoopSettings:
    """Read the loop's numbers out of the recipe."""
    return LoopSettings(
        output_dir=output_dir,
        seed=recipe.train.seed,
        total_steps=length.total_steps,
        total_prompts=length.total_prompts,
        prompts_per_step=recipe.train.prompts_per_step,
        steps_per_generation=recipe.grpo.steps_per_generation,
        num_iterations=recipe.grpo.num_iterations,
        num_generations=recipe.grpo.num_generations,
        mask_truncated_completions=recipe.grpo.mask_truncated_completions,
        max_grad_norm=recipe.train.max_grad_norm,
        save_steps=recipe.train.save_steps,
        eval_every=recipe.eval.every,
        failure_budget=recipe.rewards.failure_budget,
        best_metric=recipe.eval.best_metric,
        greater_is_better=recipe.eval.greater_is_better,
    )
