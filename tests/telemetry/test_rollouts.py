"""Length metrics against values counted by hand."""

import math
from collections.abc import Callable

import pytest

from grpo_cli.metrics import merge, results
from grpo_cli.telemetry.rollouts import rollout_metrics
from grpo_cli.types import ScoredGroup


def test_lengths_count_all_completions_and_terminated_ones_apart(make_scored: Callable[..., ScoredGroup]) -> None:
    first = make_scored("abc", [[0.0]] * 3, lengths=[4, 10, 7], stopped=[True, False, True])
    second = make_scored("de", [[0.0]] * 2, lengths=[2, 10], stopped=[True, False])
    assert results(rollout_metrics([first, second])) == {
        "completions/mean_length": pytest.approx((4 + 10 + 7 + 2 + 10) / 5),
        "completions/min_length": 2,
        "completions/max_length": 10,
        "completions/mean_terminated_length": pytest.approx((4 + 7 + 2) / 3),
        "completions/min_terminated_length": 2,
        "completions/max_terminated_length": 7,
        "completions/clipped_ratio": pytest.approx(2 / 5),
    }


def test_terminated_lengths_are_nan_when_every_completion_was_cut(make_scored: Callable[..., ScoredGroup]) -> None:
    group = make_scored("ab", [[0.0]] * 2, lengths=[5, 5], stopped=[False, False])
    numbers = results(rollout_metrics([group]))
    assert [name for name, value in numbers.items() if math.isnan(value)] == [
        "completions/mean_terminated_length",
        "completions/min_terminated_length",
        "completions/max_terminated_length",
    ]
    assert numbers["completions/clipped_ratio"] == 1.0


def test_a_completion_that_stopped_at_the_last_token_is_not_clipped(make_scored: Callable[..., ScoredGroup]) -> None:
    group = make_scored("ab", [[0.0]] * 2, lengths=[5, 5], stopped=[True, False])
    assert results(rollout_metrics([group]))["completions/clipped_ratio"] == 0.5


def test_metrics_of_parts_merge_to_the_metrics_of_the_whole(make_scored: Callable[..., ScoredGroup]) -> None:
    uneven = [
        make_scored("abc", [[0.0]] * 3, lengths=[1, 9, 4], stopped=[True, False, True]),
        make_scored("a", [[0.0]], lengths=[6], stopped=[False]),
    ]
    parts = merge([rollout_metrics(uneven[:1]), rollout_metrics(uneven[1:])])
    assert results(parts) == results(rollout_metrics(uneven))


def test_no_completions_give_nan_and_no_error() -> None:
    assert all(math.isnan(value) for value in results(rollout_metrics([])).values())
