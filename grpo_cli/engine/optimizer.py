"""Optimizer and learning-rate schedule."""

from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from grpo_cli.recipe.schema import TrainSection
from grpo_cli.sharding import whole_shape


def build_optimizer(policy: nn.Module, section: TrainSection, *, device: torch.device) -> AdamW:
    """Make AdamW (Loshchilov and Hutter 2019) with weight decay on matrices only, fused where the device can."""
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if len(whole_shape(p)) >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in trained if len(whole_shape(p)) < 2], "weight_decay": 0.0},
    ]
    return AdamW(
        [group for group in groups if group["params"]],
        lr=section.learning_rate,
        betas=(section.adam_beta1, section.adam_beta2),
        eps=section.adam_epsilon,
        fused=device.type in {"cpu", "cuda", "mps"},
    )


def build_schedule(optimizer: Optimizer, section: TrainSection, *, total_steps: int) -> LambdaLR:
    """Make the learning-rate schedule; it is stepped once per optimizer step."""
    warmup = section.warmup_steps or round(section.warmup_ratio * total_steps)
    schedule: Any = get_scheduler(
        section.lr_scheduler_type, optimizer, num_warmup_steps=warmup, num_training_steps=total_steps
    )
    assert isinstance(schedule, LambdaLR)
    return schedule


def continue_schedule(schedule: LambdaLR, *, steps: int) -> None:
    """Put a fresh schedule where it is after some steps. The learning rate is the recipe's, also if it was changed meanwhile."""
    schedule.last_epoch = steps
    rates = [base * factor(steps) for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule._last_lr = rates  # noqa: SLF001  what `get_last_lr` gives; only `step` sets it otherwise
