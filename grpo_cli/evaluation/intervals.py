"""How far the numbers of an evaluation may be off, by resampling its prompts.

Completions of one prompt are alike, so that prompts are drawn, with all their completions: a cluster bootstrap, as clustered standard
errors are in Miller 2024, arXiv:2411.00640. Intervals are bias-corrected and accelerated (BCa; Efron 1987, "Better bootstrap confidence
intervals"), the same as scipy.stats.bootstrap gives, but for a ratio of sums: leaving each prompt out in turn needs no sum of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import norm

from grpo_cli.evaluation.measures import Measure
from grpo_cli.evaluation.sheet import Floats

CONFIDENCE = 0.95
RESAMPLES = 2000
_ROWS_AT_ONCE = 2**21
"""Drawn prompts that are held in memory at once."""

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """How much larger a metric is for one model than for another, over the prompts that both have.

    Attributes:
        value: The difference; NaN if a prompt has it for neither.
        interval: Where it may be; None: no telling.
        prompts: That both have a value for.
    """

    value: float
    interval: Interval | None
    prompts: int


def interval(measure: Measure, *, seed: int) -> Interval | None:
    """Give the interval in which a metric's mean lies, with 95 % confidence.

    Args:
        measure: The metric.
        seed: Of the resampling; all metrics are resampled alike.

    Returns:
        None if resampling cannot tell: with one prompt, or where all prompts have the same.
    """
    known = measure.counts > 0
    totals, counts = measure.totals[known], measure.counts[known]
    if not _spreads(totals, counts):
        return None
    return _bias_corrected((totals, counts), seed=seed)


def difference(ours: Measure, theirs: Measure, *, seed: int) -> Difference:
    """Compare a metric of two models on the same prompts: both are resampled together, so that hard prompts are hard for both.

    Args:
        ours: The metric of one model.
        theirs: The same of the other, prompt by prompt.
        seed: Of the resampling.
    """
    known = (ours.counts > 0) & (theirs.counts > 0)
    samples = (ours.totals[known], ours.counts[known], theirs.totals[known], theirs.counts[known])
    if not known.any():
        return Difference(value=float("nan"), interval=None, prompts=0)
    value = float(_statistic([sample.sum() for sample in samples]))
    spreads = _spreads(*samples[:2]) or _spreads(*samples[2:])
    found = _bias_corrected(samples, seed=seed) if spreads else None
    return Difference(value=value, interval=found, prompts=int(known.sum()))


def _spreads(totals: Floats, counts: Floats) -> bool:
    """Tell whether prompts differ; rounding aside."""
    if len(totals) < 2:
        return False
    values = totals / counts
    return bool(np.ptp(values) > 1e-12 * np.abs(values).max())


def _statistic(sums: Sequence[Any]) -> Any:
    """Give total / count, or the difference of two such ratios, for sums that may be arrays."""
    total, count, *other = sums
    return total / count - other[0] / other[1] if other else total / count


def _bias_corrected(samples: tuple[Floats, ...], *, seed: int) -> Interval | None:
    """Compute the BCa interval of `_statistic` (Efron and Tibshirani 1993, An Introduction to the Bootstrap, eq. 14.9 to 14.15).

    Args:
        samples: Totals and counts, and those of the other model; each [P].
        seed: Of the resampling.

    Returns:
        None where no resample is on one side of the estimate: there is no correction to compute.
    """
    sums = [sample.sum() for sample in samples]
    value, drawn = _statistic(sums), _resampled(samples, seed=seed)
    below = ((drawn < value).mean() + (drawn <= value).mean()) / 2
    if not 0 < below < 1:
        return None
    without_one = _statistic([total - sample for total, sample in zip(sums, samples, strict=True)])
    influence = without_one.mean() - without_one
    spread = (influence**2).sum()
    if not spread:
        return None
    acceleration = (influence**3).sum() / (6 * spread**1.5)
    bias, tail = norm.ppf(below), norm.ppf((1 - CONFIDENCE) / 2)
    shifted = bias + np.array([tail, -tail])
    low, high = np.quantile(drawn, norm.cdf(bias + shifted / (1 - acceleration * shifted)))
    return float(low), float(high)


def _resampled(samples: tuple[Floats, ...], *, seed: int) -> Floats:
    """Draw as many prompts as there are, again and again, and give the statistic each time [RESAMPLES]."""
    generator, prompts = np.random.default_rng(seed), len(samples[0])
    rows = max(1, _ROWS_AT_ONCE // prompts)
    found = []
    for start in range(0, RESAMPLES, rows):
        chosen = generator.integers(0, prompts, size=(min(rows, RESAMPLES - start), prompts))
        found.append(_statistic([sample[chosen].sum(axis=-1) for sample in samples]))
    return np.concatenate(found)
