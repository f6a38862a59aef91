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
from grpo_cli.engine.generation import recorded_rollouts
from grpo_cli.engine.recording import Recording
from grpo_cli.engine.rewarding import Drawn, Rewarded, RewardedByEach, RewardedByMain
from grpo_cli.metrics import Metrics, merge, results
from grpo_cli.objective.advantages import (
    AdvantageSettings,
    MultiObjectiveAggregation,
    ScaleRewards,
    advantages,
    reward_metrics,
)
from grpo_cli.recipe.schema import LoggingSection
from grpo_cli.scoring.runtime import Scores
from grpo_cli.telemetry.records import Rollouts
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


@pytest.mark.parametrize("most", [None, 1, 6, 100])
@pytest.mark.parametrize("kind", [RewardedByMain, RewardedByEach])
@pytest.mark.parametrize("main_only", [False, True])
def test_every_process_learns_how_its_groups_were_scored_and_the_main_one_records_the_first(
    main_only: bool, kind: type[RewardedByMain | RewardedByEach], most: int | None
) -> None:
    """Rewards, those that do not apply, groups that were left out, and functions that failed; also where groups are uneven."""
    groups = [group(number, "p", ["a"] * (1 + number % 3)) for number in range(5)]
    recording = Recording(settings=LoggingSection(num_completions_to_log=most), steps_per_window=1, num_generations=3)
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
            assert kind is RewardedByEach or [one.prompt.uid for one in asked] == [one.prompt.uid for one in groups]
            scored = {one.group.prompt.uid: one for one in made}
            return Scores(groups=tuple(replace(scored[one.prompt.uid], group=one) for one in asked), metrics={})

    def work(processes: ThreadedProcesses) -> tuple[Rewarded, Rollouts]:
        division = Division(rank=processes.rank, processes=3, engines=1 if main_only else 3, main_only=main_only)
        scorer: Any = Scorer()
        more = {"seed": 0} if kind is RewardedByEach else {}
        rewarding = kind(scorer=scorer, processes=processes, division=division, recording=recording, **more)
        own = [groups[place] for place in division.kept(len(groups))]
        wanted = rewarding.wanted(len(groups), step=STATE.global_step)
        drawn = Drawn(count=len(groups), prompts={place: groups[place].prompt for place in wanted})
        rewarded = rewarding.score(own, drawn, STATE)
        values = [one.rewards[:, 0] * 10 for one in rewarded.own.groups]
        return rewarded, recorded_rollouts(rewarded, values, processes)

    found = in_threads(3, work)
    told = [one for rewarded, _ in found for one in rewarded.own.groups]
    assert [one.group.prompt.uid for one in told] == [one.prompt.uid for one in groups]
    for one, other in zip(told, made, strict=True):
        torch.testing.assert_close(one.rewards, other.rewards, rtol=0, atol=0, equal_nan=True)
        assert (one.dropped, one.failed) == (other.dropped, other.failed)
    rollouts, *others = (told for _, told in found)
    expected = made[: {None: 5, 1: 1, 6: 2, 100: 5}[most]]
    assert [one.group.prompt.uid for one in rollouts.scored] == [one.group.prompt.uid for one in expected]
    for one, other, values in zip(rollouts.scored, expected, rollouts.advantages, strict=True):
        torch.testing.assert_close(one.rewards, other.rewards, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(values, other.rewards[:, 0] * 10)
        assert (one.dropped, one.failed) == (other.dropped, other.failed)
    assert not any(told.scored or told.advantages for told in others)


def test_nothing_is_recorded_of_steps_that_show_and_write_nothing() -> None:
    settings = LoggingSection(log_completions=False, print_completions_steps=2, num_completions_to_log=3)
    recording = Recording(settings=settings, steps_per_window=1, num_generations=2)
    assert [len(recording.places(10, step=step)) for step in range(4)] == [0, 2, 0, 2]
    assert len(recording.places(1, step=1)) == 1
