"""Metrics that are added up as numbers are those that are merged one by one."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_cli.engine.merging import from_numbers, kinds_of, to_numbers, with_kinds
from grpo_cli.metrics import Max, Mean, Metrics, Min, Sum, merge

NUMBERS = st.integers(-1000, 1000).map(lambda number: number / 8)
PROCESS = st.fixed_dictionaries(
    {},
    optional={
        "sum": st.builds(Sum, NUMBERS),
        "mean": st.builds(Mean, NUMBERS, st.integers(0, 9)),
        "max": st.builds(Max, NUMBERS | st.just(-math.inf)),
        "min": st.builds(Min, NUMBERS | st.just(math.inf)),
    },
)


@given(processes=st.lists(PROCESS, min_size=1, max_size=5))
def test_adding_numbers_merges_metrics(processes: list[Metrics]) -> None:
    """Multiples of an eighth add up exactly; the largest of the extremes is what a collective gives."""
    kinds: dict[str, str] = {}
    for metrics in processes:
        kinds = with_kinds(kinds, kinds_of(metrics))
    told = [to_numbers(metrics, kinds) for metrics in processes]
    sums = torch.stack([one for one, _ in told]).sum(dim=0)
    extremes = torch.stack([one for _, one in told]).max(dim=0).values
    assert from_numbers(sums, extremes, kinds) == merge(processes)


def test_a_name_with_two_kinds_of_value_is_refused() -> None:
    with pytest.raises(TypeError, match="metric 'reward' is both Sum and Mean"):
        with_kinds({"reward": "Sum"}, {"reward": "Mean"})
