"""Rewards of several processes, each of which has some groups: as if one had them all."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from engine.threaded_processes import ThreadedProcesses, in_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from scoring.scoring_groups import STATE, group

from grpo_cli.engine.division import Division
from grpo_cli.engine.rewarding import Drawn, Rewarded, RewardedByMain
from grpo_cli.metrics import Metrics, merge, results
from grpo_cli.objective.advantages import (
    AdvantageSettings,
    MultiObjectiveAggregation,
    ScaleRewards,
    advantages,
    reward_metrics,
)
from grpo_cli.scoring.runtime import Scores
from grpo_cli.types import Group, ScoredGroup

NAMES = ("first", "second")
REWARD = st.one_of(st.just(float("nan")), st.floats(-10, 10, width=32))
GROUPS = st.lists(
    st.lists(st.tuples(REWARD, REWARD), min_size=1, max_size=4).map(lambda rows: torch.tensor(rows).view(-1, 2)),
    max_size=6,
)


@given(groups=GROUPS, data=st.data())
@settings(deadline=None, max_examples=40)
def test_processes_that_tell_each_other_sums_find_what_one_with_all_groups_finds(
    groups: list[torch.Tensor], data: st.DataObject
) -> None:
    """Advantages and metrics, however the groups are spread, also where a process has none."""
    inner = data.draw(st.lists(st.integers(0, len(groups)), min_size=2, max_size=2), label="cuts")
    places = list(pairwise([0, *sorted(inner), len(groups)]))
    how = AdvantageSettings(
        weights=(1.0, 0.3),
        scale_rewards=data.draw(st.sampled_from(ScaleRewards)),
        multi_objective_aggregation=data.draw(st.sampled_from(MultiObjectiveAggregation)),
    )

    def work(processes: ThreadedProcesses) -> tuple[tuple[torch.Tensor, ...], Metrics]:
        own = groups[slice(*places[processes.rank])]
        return advantages(own, how, processes.sum), reward_metrics(own, NAMES, how, processes.sum)

    found = in_threads(3, work)
    values = [one for part, _ in found for one in part]
    # Dividing by a standard deviation of 0 and a ten-thousandth makes much of the last digit.
    for one, other in zip(values, advantages(groups, how), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    together = results(merge([metrics for _, metrics in found]))
    alone = results(reward_metrics(groups, NAMES, how))
    assert together.keys() == alone.keys()
    assert list(together.values()) == pytest.approx(list(alone.values()), rel=1e-9, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("main_only", [False, True])
def test_every_process_learns_how_its_groups_were_scored(main_only: bool) -> None:
    """Rewards, those that do not apply, groups that were left out, and functions that failed; also where groups are uneven."""
    groups = [group(number, "p", ["a"] * (1 + number % 3)) for number in range(5)]
    nan = float("nan")
    made = [
        ScoredGroup(
            group=one,
            rewards=torch.tensor([[number + 0.5, nan if number == 3 else -1.0]] * len(one.completions)),
            extras={},
            dropped=number == 2,
            failed=("second",) if number == 3 else (),
        )
        for number, one in enumerate(groups)
    ]

    class Scorer:
        names = NAMES

        def score(self, asked: list[Group], *_: Any) -> Scores:
            assert [one.prompt.uid for one in asked] == [one.prompt.uid for one in groups]
            return Scores(
                groups=tuple(replace(one, group=own) for one, own in zip(made, asked, strict=True)), metrics={}
            )

    def work(processes: ThreadedProcesses) -> Rewarded:
        division = Division(rank=processes.rank, processes=3, engines=1 if main_only else 3, main_only=main_only)
        scorer: Any = Scorer()
        rewarding = RewardedByMain(scorer=scorer, processes=processes, division=division)
        own = [groups[place] for place in division.kept(len(groups))]
        drawn = Drawn(count=len(groups), prompts={number: one.prompt for number, one in enumerate(groups)})
        return rewarding.score(own, drawn, STATE)

    told = [one for rewarded in in_threads(3, work) for one in rewarded.own.groups]
    assert [one.group.prompt.uid for one in told] == [one.prompt.uid for one in groups]
    for one, other in zip(told, made, strict=True):
        torch.testing.assert_close(one.rewards, other.rewards, rtol=0, atol=0, equal_nan=True)
        assert (one.dropped, one.failed) == (other.dropped, other.failed)
