"""How functions are called: once or for each prompt, how many at a time, how often, again, and before all completions are there."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import pytest
from scoring.scoring_groups import STATE, group

from grpo_cli.scoring.limits import CallLimits
from grpo_cli.scoring.reward import make_reward
from grpo_cli.scoring.runtime import RewardScorer

GROUPS = [group(number, "p", ["a" * number, "b"]) for number in range(1, 7)]


def scorer(function: Callable[..., Any], on_error: Literal["stop", "drop"] = "drop", **limits: Any) -> RewardScorer:
    return RewardScorer([make_reward("judge", function, limits=CallLimits(**limits))], on_error=on_error)


def lengths(completions: list[str]) -> list[float]:
    return [float(len(text)) for text in completions]


class Crowd:
    """An async reward that counts how many calls of it are under way."""

    def __init__(self, together: int = 1) -> None:
        self.sizes: list[int] = []
        self.most = 0
        self._now = 0
        self._together = together
        self._all_there = asyncio.Event()

    async def __call__(self, completions: list[str]) -> list[float]:
        self.sizes.append(len(completions))
        self._now += 1
        self.most = max(self.most, self._now)
        if self._now == self._together:
            self._all_there.set()
        await asyncio.wait_for(self._all_there.wait(), 10)
        await asyncio.sleep(0.01)
        self._now -= 1
        return lengths(completions)


def test_a_function_is_called_for_each_prompt_with_the_same_rewards() -> None:
    sizes = []

    def function(completions: list[str]) -> list[float]:
        sizes.append(len(completions))
        return lengths(completions)

    apart = scorer(function, per_prompt=True).score(GROUPS, STATE)
    together = scorer(function).score(GROUPS, STATE)
    assert sizes == [2, 2, 2, 2, 2, 2, 12]
    assert [one.rewards.tolist() for one in apart.groups] == [one.rewards.tolist() for one in together.groups]
    assert {"time/reward/judge/mean", "time/reward/judge/max"} == apart.metrics.keys() - together.metrics.keys()


@pytest.mark.parametrize("concurrency", [1, 3, 6])
def test_as_many_calls_are_under_way_as_may_be(concurrency: int) -> None:
    """Each waits until so many are there: fewer would wait for ever."""
    crowd = Crowd(together=concurrency)
    running = scorer(crowd, on_error="stop", per_prompt=True, concurrency=concurrency)
    scores = running.score(GROUPS, STATE)
    running.close()
    assert crowd.most == concurrency
    assert crowd.sizes == [2] * 6
    assert [one.rewards[0].item() for one in scores.groups] == [1, 2, 3, 4, 5, 6]


def test_calls_begin_no_more_often_than_they_may() -> None:
    begun: list[float] = []

    async def function(completions: list[str]) -> list[float]:
        begun.append(time.monotonic())
        return lengths(completions)

    running = scorer(function, per_prompt=True, concurrency=6, calls_per_minute=1200)
    running.score(GROUPS, STATE)
    running.close()
    assert len(begun) == 6
    assert begun[-1] - begun[0] >= 5 * 60 / 1200 * 0.9  # at least this, however slow the machine is


def test_a_coroutine_that_takes_too_long_costs_its_own_prompt() -> None:
    cancelled = threading.Event()

    async def function(completions: list[str]) -> list[float]:
        if completions[0] == "aaa":
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                cancelled.set()
                raise
        return lengths(completions)

    running = scorer(function, per_prompt=True, timeout=0.5)
    scores = running.score(GROUPS, STATE)
    running.close()
    assert cancelled.is_set()
    assert [one.dropped for one in scores.groups] == [False, False, True, False, False, False]
    assert scores.problems == (
        "prompt 0:3 is left out: reward function 'judge' took longer than 0.5 s and was cancelled",
    )


def test_a_timeout_of_the_functions_own_is_told_as_its_own() -> None:
    async def function(completions: list[str]) -> list[float]:
        raise TimeoutError("the service is down")

    scores = (running := scorer(function, per_prompt=True, timeout=100)).score(GROUPS[:1], STATE)
    running.close()
    assert "raised TimeoutError: the service is down" in scores.problems[0]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("retries", "dropped"), [(0, True), (1, True), (2, False)])
def test_a_call_is_made_again_as_often_as_it_may_be(asynchronous: bool, retries: int, dropped: bool) -> None:
    """It fails twice. What a failed attempt has logged is forgotten."""
    calls: list[int] = []

    def function(completions: list[str], log_metric: Any) -> list[float]:
        calls.append(len(completions))
        log_metric("attempt", len(calls))
        if len(calls) < 3:
            raise ConnectionError("try again")
        return lengths(completions)

    async def later(completions: list[str], log_metric: Any) -> list[float]:
        return function(completions, log_metric)

    running = scorer(later if asynchronous else function, retries=retries, per_prompt=True)
    scores = running.score(GROUPS[:1], STATE)
    running.close()
    assert scores.groups[0].dropped is dropped
    assert len(calls) == min(retries + 1, 3)
    repeated = scores.metrics.get("reward/judge/repeated_calls")
    assert (0 if repeated is None else repeated.result()) == retries
    if not dropped:
        assert scores.metrics["attempt"].result() == 3


def test_a_group_is_scored_while_others_are_not_complete() -> None:
    """The function is done with the first group before the others are there, and is not called on it again."""
    done = threading.Event()
    seen: list[str] = []

    async def function(completions: list[str]) -> list[float]:
        seen.append(completions[0])
        done.set()
        return lengths(completions)

    running = scorer(function, per_prompt=True, concurrency=2)
    running.start(GROUPS[0], STATE)
    assert done.wait(10)
    running.start(GROUPS[0], STATE)  # an engine that was lost and has sampled the same again
    running.start(group(2, "p", ["of other weights", "b"]), STATE)
    scores = running.score(GROUPS[:3], STATE)
    running.close()
    assert [one.rewards.tolist() for one in scores.groups] == [[[1.0], [1.0]], [[2.0], [1.0]], [[3.0], [1.0]]]
    assert sorted(text for text in seen if text.startswith("a")) == ["a", "aa", "aaa"]


class Ordered:
    """Rewards the order of its calls."""

    def __init__(self) -> None:
        self.calls = 0

    async def __call__(self, completions: list[str]) -> list[float]:
        self.calls += 1
        return [float(self.calls)] * len(completions)

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def test_what_has_a_state_is_called_in_the_order_of_the_prompts() -> None:
    running = scorer(Ordered(), per_prompt=True)
    for early in (GROUPS[2], GROUPS[0]):
        running.start(early, STATE)
    scores = running.score(GROUPS[:3], STATE)
    running.close()
    assert [one.rewards[0].item() for one in scores.groups] == [1, 2, 3]


def test_calls_can_be_made_after_a_close() -> None:
    running = scorer(Crowd(together=2), on_error="stop", per_prompt=True, concurrency=2)
    running.score(GROUPS[:4], STATE)
    running.close()
    running = RewardScorer(running._rewards)
    scores = running.score(GROUPS[:4], STATE)
    running.close()
    assert [one.rewards[0].item() for one in scores.groups] == [1, 2, 3, 4]


def test_nothing_begins_early_that_wants_all_completions_or_the_trainers_thread() -> None:
    calls: list[int] = []

    async def judge(completions: list[str]) -> list[float]:
        calls.append(len(completions))
        return lengths(completions)

    def plain(completions: list[str]) -> list[float]:
        calls.append(len(completions))
        return lengths(completions)

    limits = CallLimits(per_prompt=True)
    running = RewardScorer([make_reward("judge", judge), make_reward("plain", plain, limits=limits)])
    running.start(GROUPS[0], STATE)
    time.sleep(0.1)
    assert calls == []
    running.score(GROUPS[:1], STATE)
    running.close()
    assert calls == [2, 2]
