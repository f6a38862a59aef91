"""Intervals hold what they promise, and pairs tell small differences apart."""

import math

import numpy as np
import pytest
from scipy import stats

from grpo_cli.evaluation.intervals import RESAMPLES, difference, interval
from grpo_cli.evaluation.measures import Measure
from grpo_cli.evaluation.sheet import Floats

SEED = 0


def measure_of(values: Floats, counts: Floats | None = None) -> Measure:
    return Measure(totals=values, counts=np.ones_like(values) if counts is None else counts)


def drawn(generator: np.random.Generator, prompts: int, completions: int) -> Floats:
    """Draw correct completions of prompts that are easy or hard: 0.5 of all are correct, and those of one prompt are alike."""
    chances = generator.beta(0.5, 0.5, size=prompts)
    return generator.binomial(completions, chances).astype(float)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Of 200 evaluations 190 are expected; fewer than 181 or more than 198 would happen once in a few hundred times."""
    generator = np.random.default_rng(7)
    held = 0
    for _ in range(200):
        found = interval(measure_of(drawn(generator, 60, 8), np.full(60, 8.0)), seed=SEED)
        assert found is not None
        held += found[0] <= 0.5 <= found[1]
    assert 181 <= held <= 198


def test_alike_completions_are_no_further_evidence() -> None:
    """Eight equal completions say what one says; an interval over completions would be sqrt(8) times narrower."""
    one = np.random.default_rng(1).integers(0, 2, size=50).astype(float)
    alone, eightfold = interval(measure_of(one), seed=SEED), interval(measure_of(8 * one, np.full(50, 8.0)), seed=SEED)
    assert alone == eightfold


def test_an_interval_of_many_prompts_is_the_normal_one() -> None:
    values = np.random.default_rng(2).normal(3.0, 2.0, size=2000)
    found = interval(measure_of(values), seed=SEED)
    error = values.std(ddof=1) / math.sqrt(len(values))
    assert found == pytest.approx((values.mean() - 1.96 * error, values.mean() + 1.96 * error), abs=0.1 * error)


def test_prompts_without_a_value_change_nothing() -> None:
    values = np.array([1.0, 0.0, 1.0, 1.0, 0.0])
    padded, counts = np.append(values, [0.0, 0.0]), np.array([1.0] * 5 + [0.0] * 2)
    assert interval(measure_of(padded, counts), seed=SEED) == interval(measure_of(values), seed=SEED)


def ratio(totals: Floats, counts: Floats, axis: int = -1) -> Floats:
    found: Floats = totals.sum(axis=axis) / counts.sum(axis=axis)
    return found


def ratio_difference(mine: Floats, counts: Floats, theirs: Floats, others: Floats, axis: int = -1) -> Floats:
    return ratio(mine, counts, axis) - ratio(theirs, others, axis)


@pytest.mark.parametrize("prompts", [5, 40])
def test_intervals_are_those_of_scipy(prompts: int) -> None:
    """Which leaves prompts out one by one."""
    generator = np.random.default_rng(5)
    samples = [generator.gamma(0.5, size=prompts), generator.integers(1, 9, size=prompts).astype(float)]
    samples += [generator.gamma(0.5, size=prompts), generator.integers(1, 9, size=prompts).astype(float)]
    mine, theirs = measure_of(*samples[:2]), measure_of(*samples[2:])
    found = [interval(mine, seed=SEED), difference(mine, theirs, seed=SEED).interval]
    for ours, used, statistic in zip(found, (samples[:2], samples), (ratio, ratio_difference), strict=True):
        expected = stats.bootstrap(
            used,
            statistic,
            paired=True,
            vectorized=True,
            n_resamples=RESAMPLES,
            method="BCa",
            rng=np.random.default_rng(SEED),
        ).confidence_interval
        assert ours == pytest.approx((expected.low, expected.high), rel=1e-12)


@pytest.mark.parametrize("values", [[0.5], [1.0, 1.0, 1.0], [0.1 + 0.2, 0.3]])
def test_where_resampling_cannot_tell_there_is_no_interval(values: list[float]) -> None:
    assert interval(measure_of(np.array(values)), seed=SEED) is None


def test_the_same_seed_gives_the_same_interval() -> None:
    measure = measure_of(np.random.default_rng(3).random(30))
    assert interval(measure, seed=1) == interval(measure, seed=1)
    assert interval(measure, seed=1) != interval(measure, seed=2)


def test_pairs_see_a_difference_that_two_intervals_do_not() -> None:
    generator = np.random.default_rng(4)
    theirs = generator.random(200)
    ours = theirs + 0.02 + generator.normal(0, 0.02, size=200)
    found = difference(measure_of(ours), measure_of(theirs), seed=SEED)
    assert found.value == pytest.approx((ours - theirs).mean())
    assert found.interval is not None
    assert 0 < found.interval[0] < 0.02 < found.interval[1] < 0.03
    mine, others = interval(measure_of(ours), seed=SEED), interval(measure_of(theirs), seed=SEED)
    assert mine is not None
    assert others is not None
    assert mine[0] < others[1], "side by side they overlap"


def test_a_difference_is_over_the_prompts_that_both_have() -> None:
    ours, theirs = np.array([1.0, 0.0, 1.0, 0.0]), np.array([0.0, 0.0, 1.0, 1.0])
    found = difference(measure_of(ours, np.array([1.0, 1, 1, 0])), measure_of(theirs, np.array([1.0, 1, 0, 1])), seed=0)
    assert (found.value, found.prompts) == (0.5, 2)
    nothing = difference(
        measure_of(ours, np.array([1.0, 0, 0, 0])), measure_of(theirs, np.array([0.0, 1, 0, 0])), seed=0
    )
    assert math.isnan(nothing.value)
    assert (nothing.interval, nothing.prompts) == (None, 0)
