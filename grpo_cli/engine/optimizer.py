"""Optimizer and learning-rate schedule."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from grpo_cli.policy.parts import learning_rates
from grpo_cli.recipe.schema import TrainSection
from grpo_cli.sharding import whole_shape


def build_optimizer(model: nn.Module, section: TrainSection, *, device: torch.device) -> AdamW:
    """Make AdamW (Loshchilov and Hutter 2019) with weight decay on matrices only, fused where the device can.

    Raises:
        ModelError: If a part that has a learning rate of its own is unknown, or none of its weights is trained.
    """
    own_rates = learning_rates(model, section.learning_rates)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rates = dict.fromkeys([section.learning_rate, *own_rates.values()])
    by_rate = {
        rate: [one for one in trained if own_rates.get(id(one), section.learning_rate) == rate] for rate in rates
    }
    return AdamW(
        [group for rate, parameters in by_rate.items() for group in _groups(parameters, rate, section.weight_decay)],
        lr=section.learning_rate,
        betas=(section.adam_beta1, section.adam_beta2),
        eps=section.adam_epsilon,
        fused=device.type in {"cpu", "cuda", "mps"},
    )


def _groups(parameters: Sequence[nn.Parameter], rate: float, weight_decay: float) -> Iterator[dict[str, Any]]:
    """Give the groups of parameters with one learning rate: matrices, and the rest."""
    for matrices in (True, False):
        members = [one for one in parameters if (len(whole_shape(one)) >= 2) is matrices]
        if members:
            yield {"params": members, "lr": rate, "weight_decay": weight_decay if matrices else 0.0}


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
