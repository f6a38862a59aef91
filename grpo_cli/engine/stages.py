"""The built stages of a run, and the numbers that its loop goes by."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from grpo_cli.data.sampler import PromptSource
from grpo_cli.engine.checkpoint_store import CheckpointStore
from grpo_cli.engine.distributed import Processes
from grpo_cli.engine.division import Division
from grpo_cli.engine.evaluation import Evaluator
from grpo_cli.engine.health import RunHealth
from grpo_cli.engine.recent_rewards import RewardMemory
from grpo_cli.engine.rewarding import Rewarding
from grpo_cli.engine.shared_scoring import Scorer
from grpo_cli.engine.step import GradientPass
from grpo_cli.engine.strategies.strategy import Strategy
from grpo_cli.engine.weight_sync import WeightSync
from grpo_cli.objective.advantages import AdvantageSettings
from grpo_cli.policy.forward import PolicyModel
from grpo_cli.policy.reference import Reference
from grpo_cli.telemetry.recorder import Recorder
from grpo_cli.types import Sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopSettings:
    """How far and in which strides the loop goes.

    Attributes:
        output_dir: The run directory.
        seed: The run's seed.
        total_steps: Optimizer steps of the whole run.
        total_prompts: Prompts of the whole run, if it is measured in epochs; None: `total_steps` alone ends it.
        prompts_per_step: Prompts of one optimizer step.
        steps_per_generation: Optimizer steps that share one generation.
        num_iterations: Passes over a generation.
        num_generations: Completions per prompt.
        mask_truncated_completions: Leave truncated completions out of the loss.
        max_grad_norm: Clip the gradient there; 0 does not clip.
        save_steps: Steps between checkpoints; 0: only at the end.
        eval_every: Steps between evaluations; 0: only at the start and the end.
        failure_budget: Share of a generation's prompts on which reward functions must not fail.
        best_metric: The evaluation metric that picks the best checkpoint.
        greater_is_better: Whether larger is better.
    """

    output_dir: Path
    seed: int
    total_steps: int
    total_prompts: int | None
    prompts_per_step: int
    steps_per_generation: int
    num_iterations: int
    num_generations: int
    mask_truncated_completions: bool
    max_grad_norm: float
    save_steps: int
    eval_every: int
    failure_budget: float
    best_metric: str
    greater_is_better: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """Everything the loop calls, in the order of the line: prompts, rollouts, rewards, advantages, objective, step, records.

    Attributes:
        processes: The processes of this run.
        division: Which of them samples what.
        strategy: How they train together.
        tokenizer: Saved with every model.
        model_files: Saved with every model, too: what its own prepares images with, and what tells the weights below adapters, by name.
        prompts: Gives the next prompts.
        weight_sync: Prompts to completions of the newest weights.
        sampling: How training completions are drawn.
        scorer: Completions to rewards.
        rewarding: Has the completions of all processes scored by it.
        reward_memory: How the latest generations were rewarded.
        advantage_settings: Rewards to advantages.
        gradients: Groups to gradients.
        policy: The policy.
        prepared: What is called instead of it in training.
        reference: The reference of the KL term, if there is one.
        schedule: Its learning rate.
        trained_shapes: Shapes of the parameters that the optimizer moves, in its order.
        evaluator: Held-out prompts, if there are any.
        health: Notices runs that cannot learn.
        checkpoints: What is on disk.
        recorder: What is told.
        recipe: The resolved recipe as plain data, to be kept in checkpoints.
    """

    processes: Processes
    division: Division
    strategy: Strategy
    tokenizer: Any
    model_files: Mapping[str, bytes]
    prompts: PromptSource
    weight_sync: WeightSync
    sampling: Sampling
    scorer: Scorer
    rewarding: Rewarding
    reward_memory: RewardMemory
    advantage_settings: AdvantageSettings
    gradients: GradientPass
    policy: PolicyModel
    prepared: nn.Module
    reference: Reference | None
    schedule: LambdaLR
    trained_shapes: Sequence[torch.Size]
    evaluator: Evaluator | None
    health: RunHealth
    checkpoints: CheckpointStore
    recorder: Recorder
    recipe: Mapping[str, Any]
