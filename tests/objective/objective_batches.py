"""Synthetic micro-batches for the objective's tests, and the cuts and shuffles that must not matter."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo_cli.objective.correction import CorrectionMode, CorrectionSettings
from grpo_cli.objective.loss import loss
from grpo_cli.objective.masks import entropy_threshold
from grpo_cli.objective.ratio import RatioLevel
from grpo_cli.objective.settings import LossType, ObjectiveSettings
from grpo_cli.types import LossOutput, StepTotals, TokenBatch, TokenStats

ALLOWED = [
    (loss_type, level)
    for loss_type in LossType
    for level in RatioLevel
    if (loss_type, level) != (LossType.LUSPO, RatioLevel.TOKEN)
]
"""Every objective at every level, but the one that the catalog refuses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """A micro-batch before its forward: all float64, leaves without gradient."""

    logps: Tensor
    entropies: Tensor
    tokens: TokenBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """A loss and its gradients."""

    output: LossOutput
    grad_logps: Tensor
    grad_entropies: Tensor


def make_batch(
    lengths: Sequence[int], *, seed: int, masked: Sequence[bool] = (), with_old: bool = True, spread: float = 0.3
) -> Batch:
    """Draw a batch of len(lengths) completions; `masked` ones have no loss tokens."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    out_of_loss = torch.tensor(list(masked) or [False] * len(lengths), dtype=torch.bool)

    def normal(number: int) -> Tensor:
        return torch.randn(number, generator=generator, dtype=torch.float64)

    count = index.numel()
    old = -normal(count).abs() - 0.5
    tokens = TokenBatch(
        sequence=index,
        loss_mask=~out_of_loss[index],
        advantages=normal(len(lengths)),
        behaviour_logps=old + 0.1 * normal(count),
        old_logps=old if with_old else None,
        ref_logps=old + 0.5 * normal(count),
    )
    return Batch(logps=old + spread * normal(count), entropies=normal(count).abs(), tokens=tokens)


def make_settings(loss_type: LossType, level: RatioLevel = RatioLevel.TOKEN, **changes: object) -> ObjectiveSettings:
    """Settings in which clips, ceilings and thresholds have something to do on the batches above."""
    settings = ObjectiveSettings(
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon_high=1.1 if loss_type == LossType.CISPO else 0.25,
        max_completion_length=16,
    )
    return replace(settings, **changes)  # type: ignore[arg-type]


def correct(level: str, mode: str, clip_min: float | None = 0.9, clip_max: float | None = 1.1) -> CorrectionSettings:
    return CorrectionSettings(level=RatioLevel(level), mode=CorrectionMode(mode), clip_min=clip_min, clip_max=clip_max)


def make_totals(batches: Iterable[Batch], settings: ObjectiveSettings) -> StepTotals:
    """Totals of a step on one process."""
    batches = list(batches)
    entropies = torch.cat([batch.entropies for batch in batches])
    mask = torch.cat([batch.tokens.loss_mask for batch in batches])
    threshold = None
    if settings.top_entropy_quantile < 1:
        threshold = entropy_threshold(entropies, mask, settings.top_entropy_quantile)
    count = float(mask.sum())
    sequences = float(sum(batch.tokens.advantages.numel() for batch in batches))
    return StepTotals(
        completion_tokens=count,
        sequences=sequences,
        local_tokens=count,
        entropy_threshold=threshold,
        entropy_tokens=float((mask & (entropies >= (-math.inf if threshold is None else threshold))).sum()),
    )


def run(batch: Batch, totals: StepTotals, settings: ObjectiveSettings) -> Outcome:
    """Loss and gradients of a micro-batch."""
    logps = batch.logps.clone().requires_grad_()
    entropies = batch.entropies.clone().requires_grad_()
    stats = TokenStats(logps=logps, entropies=entropies, tokens_useful=0, tokens_computed=0)
    output = loss(stats, batch.tokens, totals, settings)
    torch.autograd.backward(output.loss)
    zeros = torch.zeros_like
    return Outcome(
        output=output,
        grad_logps=zeros(logps) if logps.grad is None else logps.grad,
        grad_entropies=zeros(entropies) if entropies.grad is None else entropies.grad,
    )


def take(batch: Batch, tokens: Tensor, sequences: Tensor) -> Batch:
    """The given tokens (indices) of the given sequences (indices), in that order; sequences are numbered anew."""
    number = torch.full((batch.tokens.advantages.numel(),), -1)
    number[sequences] = torch.arange(sequences.numel())
    old, ref = batch.tokens.old_logps, batch.tokens.ref_logps
    return Batch(
        logps=batch.logps[tokens],
        entropies=batch.entropies[tokens],
        tokens=TokenBatch(
            sequence=number[batch.tokens.sequence[tokens]],
            loss_mask=batch.tokens.loss_mask[tokens],
            advantages=batch.tokens.advantages[sequences],
            behaviour_logps=batch.tokens.behaviour_logps[tokens],
            old_logps=None if old is None else old[tokens],
            ref_logps=None if ref is None else ref[tokens],
        ),
    )


def pad(batch: Batch, at: Sequence[int], filler: float) -> tuple[Batch, Tensor]:
    """Insert masked tokens full of `filler` at places; returns the batch and where the old tokens went."""
    order = sorted(at, reverse=True)
    kept = list(range(batch.logps.numel()))
    for place in order:
        kept.insert(place % (len(kept) + 1), -1)
    positions = torch.tensor([i for i, source in enumerate(kept) if source >= 0])

    def widen(values: Tensor, fill: float) -> Tensor:
        wide = torch.full((len(kept),), fill, dtype=values.dtype)
        wide[positions] = values
        return wide

    tokens = batch.tokens
    return Batch(
        logps=widen(batch.logps, filler),
        entropies=widen(batch.entropies, filler),
        tokens=TokenBatch(
            sequence=widen(tokens.sequence, 0),
            loss_mask=widen(tokens.loss_mask, False),
            advantages=tokens.advantages,
            behaviour_logps=widen(tokens.behaviour_logps, filler),
            old_logps=None if tokens.old_logps is None else widen(tokens.old_logps, filler),
            ref_logps=None if tokens.ref_logps is None else widen(tokens.ref_logps, filler),
        ),
    ), positions
