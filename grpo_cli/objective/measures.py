"""What a loss reports about its tokens.

A measure stays a tensor until the end: `read` brings all of a micro-batch's to the host in one transfer.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_cli.metrics import Max, Mean, Metrics, MetricValue, Min
from grpo_cli.objective.correction import left_out, outside_bounds
from grpo_cli.objective.ratio import RatioLevel
from grpo_cli.objective.sequences import Sequences
from grpo_cli.objective.settings import ObjectiveSettings
from grpo_cli.objective.surrogate import gamma_weight
from grpo_cli.objective.terms import LossTerms


@dataclass(frozen=True, slots=True)
class Measure:
    """A metric value before it leaves the device: what it will be, and its arguments as scalar tensors."""

    kind: type[MetricValue]
    arguments: tuple[Tensor, ...]


Measures = Mapping[str, Measure]


def read(measures: Measures) -> Metrics:
    """Turn measures into metric values."""
    arguments = [argument.detach() for measure in measures.values() for argument in measure.arguments]
    numbers = iter(torch.stack(arguments).tolist())
    return {name: measure.kind(*(next(numbers) for _ in measure.arguments)) for name, measure in measures.items()}


def mean(values: Tensor, counted: Tensor | None = None) -> Measure:
    """Mean over values of any shape, or over those that are `counted` (bool)."""
    counted = torch.ones_like(values, dtype=torch.bool) if counted is None else counted
    return Measure(Mean, (values.masked_fill(~counted, 0.0).sum(), counted.sum().to(values.dtype)))


def smallest(values: Tensor, counted: Tensor) -> Measure:
    """Smallest of the values that are `counted` (bool)."""
    return Measure(Min, (torch.cat([values.masked_fill(~counted, math.inf), values.new_full((1,), math.inf)]).min(),))


def largest(values: Tensor, counted: Tensor) -> Measure:
    """Largest of the values that are `counted` (bool)."""
    return Measure(Max, (torch.cat([values.masked_fill(~counted, -math.inf), values.new_full((1,), -math.inf)]).max(),))


def mean_at(level: RatioLevel, values: Tensor, sequences: Sequences) -> Measure:
    """Mean of values [K] over tokens, or, where they belong to sequences, over those that have tokens."""
    if level == RatioLevel.SEQUENCE:
        return mean(sequences.mean(values), sequences.active)
    return mean(values)


def clip_measures(terms: LossTerms, settings: ObjectiveSettings) -> Measures:
    """Share of ratios outside the clip range on the side where the clip stops the gradient, over all and by sequence."""
    ratio = terms.ratio if settings.delta is None else terms.ratio.clamp(max=settings.delta)
    low = ((ratio < 1.0 - settings.epsilon) & (terms.advantages < 0)).to(ratio.dtype)
    high = ((ratio > 1.0 + settings.epsilon_high) & (terms.advantages > 0)).to(ratio.dtype)
    level, sequences = settings.importance_sampling_level, terms.sequences
    return {
        "clip_ratio/region_mean": mean_at(level, low + high, sequences),
        "clip_ratio/low_mean": mean_at(level, low, sequences),
        "clip_ratio/low_min": smallest(sequences.mean(low), sequences.active),
        "clip_ratio/high_mean": mean_at(level, high, sequences),
        "clip_ratio/high_max": largest(sequences.mean(high), sequences.active),
    }


def cispo_measures(terms: LossTerms, settings: ObjectiveSettings) -> Measures:
    """Share of ratios with positive advantage that the ceiling cuts."""
    cut = ((terms.ratio > settings.epsilon_high) & (terms.advantages > 0)).to(terms.ratio.dtype)
    return {"cispo_clip_ratio": mean_at(settings.importance_sampling_level, cut, terms.sequences)}


def vespo_measures(terms: LossTerms, settings: ObjectiveSettings) -> Measures:
    """Mean weight phi over sequences."""
    return {"vespo/phi_seq_mean": mean_at(RatioLevel.SEQUENCE, vespo_weight(terms, settings), terms.sequences)}


def vespo_weight(terms: LossTerms, settings: ObjectiveSettings) -> Tensor:
    """Weight phi of vespo for each token [K]."""
    return gamma_weight(
        terms.log_ratio,
        terms.advantages,
        terms.sequences,
        correction=terms.correction,
        k_pos=settings.vespo_k_pos,
        lambda_pos=settings.vespo_lambda_pos,
        k_neg=settings.vespo_k_neg,
        lambda_neg=settings.vespo_lambda_neg,
    )


def sampling_measures(terms: LossTerms, settings: ObjectiveSettings) -> Measures:
    """How far the rollout engine's probabilities lie from the trainer's, and what the correction makes of it.

    Ratios are reported before they are bounded, where they end at e^20, and their mean as it is used, too.
    """
    known = ~terms.behaviour.isnan()
    difference = (terms.behaviour - terms.old).abs()
    ratio, correction = terms.rollout_ratio, settings.correction
    level = correction.level if correction else RatioLevel.TOKEN
    everywhere = torch.ones_like(known)
    measures = {
        "sampling/logp_difference/mean": mean(difference, known),
        "sampling/logp_difference/max": largest(difference, known),
        "sampling/importance_ratio/min": smallest(ratio, everywhere),
        "sampling/importance_ratio/mean": mean_at(level, ratio, terms.sequences),
        "sampling/importance_ratio/max": largest(ratio, everywhere),
    }
    if correction is not None and terms.correction is not None:
        outside = outside_bounds(ratio, correction).to(ratio.dtype)
        measures["sampling/importance_ratio/clipped_fraction"] = mean_at(level, outside, terms.sequences)
        measures["sampling/importance_ratio/clipped_mean"] = mean_at(level, terms.correction, terms.sequences)
        gone = left_out(terms.correction, terms.sequences).to(ratio.dtype)
        measures["sampling/importance_ratio/masked_sequences"] = mean(gone, terms.sequences.active)
    return measures
