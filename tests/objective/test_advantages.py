"""Advantages against a second implementation in plain Python, written from the definitions, and at the edges."""

import math
import statistics
from collections.abc import Sequence
from itertools import chain, product

import pytest
import torch
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from grpo_cli.metrics import results
from grpo_cli.objective.advantages import (
    AdvantageSettings,
    MultiObjectiveAggregation,
    ScaleRewards,
    advantages,
    reward_metrics,
)

NAN = math.nan
EVERY_MODE = list(product(ScaleRewards, MultiObjectiveAggregation))
Table = list[list[float | None]]


def deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def brute_force(groups: list[Table], settings: AdvantageSettings) -> list[float]:
    """Group by group, completion by completion, in the words of the definitions; None is what nobody scored."""
    normalize_first = settings.multi_objective_aggregation == "normalize_then_sum"
    totals: list[list[float | None]] = []
    for group in groups:
        columns = [[row[f] for row in group if row[f] is not None] for f in range(len(settings.weights))]
        rows: list[float | None] = []
        for row in group:
            summands = []
            for weight, reward, column in zip(settings.weights, row, columns, strict=True):
                if reward is None:
                    continue
                scored = [value for value in column if value is not None]
                value = (reward - statistics.mean(scored)) / (deviation(scored) + 1e-4) if normalize_first else reward
                summands.append(weight * value)
            rows.append(sum(summands) if summands else None)
        totals.append(rows)
    everything = [total for total in chain.from_iterable(totals) if total is not None]
    answer: list[float] = []
    for rows in totals:
        scored = [total for total in rows if total is not None]
        if normalize_first:
            center, scale = statistics.mean(everything or [0.0]), deviation(everything) + 1e-4
        else:
            center = statistics.mean(scored or [0.0])
            scales = {"group": deviation(scored) + 1e-4, "batch": deviation(everything) + 1e-4, "none": 1.0}
            scale = scales[settings.scale_rewards]
        answer.extend(0.0 if total is None else (total - center) / scale for total in rows)
    return answer


def to_tensor(group: Table) -> torch.Tensor:
    return torch.tensor([[NAN if value is None else value for value in row] for row in group])


reward = st.one_of(st.none(), st.sampled_from([0.0, 1.0, -0.5]), st.integers(-40, 40).map(lambda value: value / 16))


@pytest.mark.parametrize(("scale", "aggregation"), EVERY_MODE)
@limits(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_advantages_agree_with_brute_force(
    scale: ScaleRewards, aggregation: MultiObjectiveAggregation, data: st.DataObject
) -> None:
    """Rewards are multiples of 1/16, which float32 holds exactly; groups differ in size."""
    functions = data.draw(st.integers(1, 3))
    row = st.lists(reward, min_size=functions, max_size=functions)
    groups = data.draw(st.lists(st.lists(row, min_size=1, max_size=5), min_size=1, max_size=4))
    weights = data.draw(st.lists(st.sampled_from([1.0, 0.5, -2.0]), min_size=functions, max_size=functions))
    settings = AdvantageSettings(weights=tuple(weights), scale_rewards=scale, multi_objective_aggregation=aggregation)
    ours = advantages([to_tensor(group) for group in groups], settings)
    assert [len(group) for group in ours] == [len(group) for group in groups]
    assert torch.cat(ours).tolist() == pytest.approx(brute_force(groups, settings), abs=1e-5, rel=1e-5)
    assert all(group.dtype == torch.float32 for group in ours)


@pytest.mark.parametrize(("scale", "aggregation"), EVERY_MODE)
def test_equal_rewards_give_exactly_zero_beside_a_group_that_differs(
    scale: ScaleRewards, aggregation: MultiObjectiveAggregation
) -> None:
    """0.1 has no exact mean; 0.1 + 0.2 and 0.3 + 0 differ in float32 only by rounding; a lone score has nothing beside it."""
    settings = AdvantageSettings(weights=(1.0, 1.0), scale_rewards=scale, multi_objective_aggregation=aggregation)
    equal = torch.tensor([[0.1, 0.7]] * 7)
    unscored = torch.tensor([[0.1, 0.7], [NAN, NAN], [0.1, 0.7]])
    lone = torch.tensor([[NAN, 5.0], [NAN, NAN], [NAN, NAN]])
    nobody = torch.full((3, 2), NAN)
    other = torch.tensor([[1.0, 0.0], [0.0, 3.0]])
    *silent, loud = advantages([equal, unscored, lone, nobody, other], settings)
    assert all(torch.equal(group, torch.zeros(len(group))) for group in silent)
    assert loud.abs().min() > 0.1

    rounding = torch.tensor([[0.1, 0.2], [0.3, 0.0], [0.2, 0.1]])
    assert len(set(rounding.double().sum(dim=1).tolist())) > 1
    if aggregation == "sum_then_normalize":
        assert torch.equal(advantages([rounding, other], settings)[0], torch.zeros(3))


def test_a_small_true_difference_is_no_rounding() -> None:
    settings = AdvantageSettings(weights=(1.0,))
    small = advantages([torch.tensor([[1.0], [1.0 + 1e-5]])], settings)[0]
    assert small.abs().min() > 0.01
    tiny = advantages([torch.tensor([[1e-9], [3e-9]])], settings)[0]
    assert tiny.abs().min() > 0


@pytest.mark.parametrize("function_count", [1, 3])
def test_rewards_that_do_not_fit_the_weights_are_refused(function_count: int) -> None:
    settings = AdvantageSettings(weights=(1.0, 1.0))
    with pytest.raises(ValueError, match="do not fit 2 reward weights"):
        advantages([torch.zeros(4, function_count)], settings)


def test_a_step_without_groups_has_no_advantages_and_no_reward() -> None:
    settings = AdvantageSettings(weights=(1.0,))
    assert advantages([], settings) == ()
    assert all(math.isnan(value) for value in results(reward_metrics([], ["f"], settings)).values())


def test_reward_metrics_count_what_was_scored() -> None:
    settings = AdvantageSettings(weights=(1.0, 2.0))
    groups = [
        torch.tensor([[1.0, NAN], [3.0, 0.5]]),  # totals 1 and 4
        torch.tensor([[2.0, NAN], [NAN, 1.0]]),  # totals 2 and 2: equal
        torch.tensor([[6.0, NAN], [NAN, NAN]]),  # one score: nothing to compare with
        torch.full((2, 2), NAN),  # nobody scored: not a group of this metric
    ]
    metrics = results(reward_metrics(groups, ["a", "b"], settings))
    assert metrics == pytest.approx(
        {
            "reward/a/mean": 3.0,
            "reward/a/std": statistics.stdev([1, 3, 2, 6]),
            "reward/b/mean": 0.75,
            "reward/b/std": statistics.stdev([0.5, 1.0]),
            "reward": 3.0,
            "reward_std": statistics.stdev([1, 4, 2, 2, 6]),
            "frac_reward_zero_std": 2 / 3,
        }
    )
