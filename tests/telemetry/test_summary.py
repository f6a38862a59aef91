"""The last words of a run: honest about what improved."""

import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from grpo_cli.telemetry.summary import RunSummary, sentence, summary_lines, window_mean


def _rewards(values: list[float]) -> list[tuple[int, float]]:
    return list(enumerate(values, start=1))


def test_a_rise_is_told_with_standard_errors_of_both_ends() -> None:
    values = [-5.0, -4.0, -3.0, -4.0, -4.0, *([-2.0] * 20), -0.5, -0.6, -0.4, -0.5, -0.5]
    assert sentence(_rewards(values)) == "reward rose from -4.00 ± 0.32 (steps 1-5) to -0.50 ± 0.03 (steps 26-30)"


def test_a_fall_is_called_a_fall() -> None:
    assert sentence(_rewards([1.0, 1.1, 0.9, 0.2, 0.1, 0.0])) == (
        "reward fell from 1.000 ± 0.058 (steps 1-3) to 0.100 ± 0.058 (steps 4-6)"
    )


def test_a_difference_within_three_standard_errors_is_called_noise() -> None:
    """Means 1.0 and 1.5, errors 1/sqrt(3) each: the difference is 0.61 errors."""
    assert sentence(_rewards([0.0, 1.0, 2.0, 0.5, 1.5, 2.5])) == (
        "reward did not change by more than noise: from 1.00 ± 0.58 (steps 1-3) to 1.50 ± 0.58 (steps 4-6)"
    )


def test_a_constant_reward_did_not_change() -> None:
    assert sentence(_rewards([1.0] * 10)) == (
        "reward did not change by more than noise: from 1.00 ± 0.00 (steps 1-5) to 1.00 ± 0.00 (steps 6-10)"
    )


def test_small_rewards_show_two_digits_of_their_error() -> None:
    values = [0.0010, 0.0011, 0.0012, 0.0021, 0.0022, 0.0023]
    assert (
        sentence(_rewards(values))
        == "reward rose from 0.001100 ± 0.000058 (steps 1-3) to 0.002200 ± 0.000058 (steps 4-6)"
    )


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], "no reward was recorded"),
        ([1.5], "reward was 1.5 at step 1"),
        ([1.5, 2.0], "reward was 1.5 at step 1 and 2 at step 2: too few steps to tell a trend"),
        ([1.5, 9.0, 2.0], "reward was 1.5 at step 1 and 2 at step 3: too few steps to tell a trend"),
    ],
)
def test_a_run_of_few_steps_claims_no_trend(values: list[float], text: str) -> None:
    assert sentence(_rewards(values)) == text


def test_standard_error_agrees_with_the_statistics_module() -> None:
    numbers = random.Random(0)
    values = [numbers.gauss(0, 1) for _ in range(5)]
    window = window_mean(_rewards(values))
    assert window.mean == pytest.approx(statistics.mean(values))
    assert window.error == pytest.approx(statistics.stdev(values) / math.sqrt(5))


def test_noise_is_rarely_called_a_trend() -> None:
    """With 5 + 5 normal values the statistic has Student's t with 8 degrees of freedom: beyond 3 lies a share of 1.7%."""
    numbers = random.Random(1)
    trials = 4000
    false = sum("noise" not in sentence(_rewards([numbers.gauss(0, 1) for _ in range(10)])) for _ in range(trials))
    assert false / trials == pytest.approx(0.017, abs=0.006)


def test_a_finished_run_says_what_improved_and_where_everything_is() -> None:
    records: list[dict[str, Any]] = [
        {"step": 0, "eval/reward": -4.25},
        *({"step": step, "reward": value} for step, value in enumerate([-4.0, -4.1, None, -1.0, -1.1], start=1)),
        {"step": 5, "eval/reward": -1.0},
    ]
    summary = RunSummary(steps_done=5, total_steps=5, seconds=371.6, final_model=Path("runs/a/final"))
    assert summary_lines(summary, records, {"metrics": Path("runs/a/metrics.jsonl")}) == [
        "finished 5 of 5 steps in 6m 12s",
        "reward rose from -4.050 ± 0.050 (steps 1-2) to -1.050 ± 0.050 (steps 4-5)",
        "eval/reward went from -4.25 (step 0) to -1 (step 5)",
        "  model    runs/a/final",
        "  metrics  runs/a/metrics.jsonl",
    ]


def test_a_stopped_run_says_how_to_go_on() -> None:
    summary = RunSummary(
        steps_done=12, total_steps=30, seconds=59.96, resume_command="grpo train recipes/quickstart.yaml --resume"
    )
    assert summary_lines(summary, [], {}) == [
        "stopped at step 12 of 30 after 1m 00s; resume with grpo train recipes/quickstart.yaml --resume",
        "no reward was recorded",
    ]
