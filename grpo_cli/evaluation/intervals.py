"""How far the numbers of an evaluation may be off, by resampling its prompts.

Completions of one prompt are alike, so that prompts are drawn, with all their completions: a cluster bootstrap, as clustered standard
errors are in Miller 2024, arXiv:2411.00640. Intervals are bias-corrected and accelerated (BCa; Efron 1987, "Better bootstrap confidence
intervals"), as SciPy computes them.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

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
    return _bootstrap((totals, counts), _ratio, seed=seed)


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
    value = float(_ratio_difference(*samples))
    spreads = _spreads(*samples[:2]) or _spreads(*samples[2:])
    found = _bootstrap(samples, _ratio_difference, seed=seed) if spreads else None
    return Difference(value=value, interval=found, prompts=int(known.sum()))


def _spreads(totals: Floats, counts: Floats) -> bool:
    """Tell whether prompts differ; rounding aside."""
    if len(totals) < 2:
        return False
    values = totals / counts
    return bool(np.ptp(values) > 1e-12 * np.abs(values).max())


def _ratio(totals: Floats, counts: Floats, axis: int = -1) -> Any:
    return totals.sum(axis=axis) / counts.sum(axis=axis)


def _ratio_difference(totals: Floats, counts: Floats, other_totals: Floats, others: Floats, axis: int = -1) -> Any:
    return _ratio(totals, counts, axis) - _ratio(other_totals, others, axis)


def _bootstrap(samples: tuple[Floats, ...], statistic: Any, *, seed: int) -> Interval | None:
    with warnings.catch_warnings():
        # Where no resample is on one side of the estimate, there is no correction to compute: that gives NaN, and None here.
        warnings.simplefilter("ignore")
        found = stats.bootstrap(
            samples,
            statistic,
            paired=True,
            vectorized=True,
            n_resamples=RESAMPLES,
            batch=max(1, _ROWS_AT_ONCE // len(samples[0])),
            confidence_level=CONFIDENCE,
            method="BCa",
            rng=np.random.default_rng(seed),
        ).confidence_interval
    low, high = float(found.low), float(found.high)
    return (low, high) if np.isfinite((low, high)).all() else None
