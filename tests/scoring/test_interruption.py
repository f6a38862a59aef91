"""Signals that arrive while rewards are computed: nothing is called again, nothing goes on, the scorer stays usable."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Awaitable
from typing import Any, Literal

import pytest
from scoring.scoring_groups import STATE, group

from grpo_cli.engine.signals import StopSignals
from grpo_cli.errors import Interrupted, RewardError
from grpo_cli.scoring.event_loop import EventLoop
from grpo_cli.scoring.reward import make_reward
from grpo_cli.scoring.runtime import RewardScorer

GROUPS = [group(0, "p", ["a", "bb"]), group(1, "q", ["ccc", "dddd"])]

OnError = Literal["stop", "drop"]


class Waiting:
    """An async reward that sends the process a signal and waits for long; from the second step on it answers.

    Args:
        sends_at: The number of the call that does so.
        fails_before: Whether the calls before it raise.
    """

    def __init__(self, sends_at: int = 1, *, fails_before: bool = False) -> None:
        self.calls = 0
        self.cancelled = threading.Event()
        self._sends_at = sends_at
        self._fails_before = fails_before

    async def __call__(self, completions: list[str]) -> list[float]:
        self.calls += 1
        if self.calls == self._sends_at:
            await self._wait()
        if self.calls < self._sends_at and self._fails_before:
            raise ValueError("no answer")
        return [1.0] * len(completions)

    async def _wait(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


def _score(running: RewardScorer) -> None:
    with StopSignals() as signals, signals.interruptible():
        running.score(GROUPS, STATE)


@pytest.fixture(params=["stop", "drop"])
def on_error(request: pytest.FixtureRequest) -> OnError:
    mode: OnError = request.param
    return mode


def test_a_plain_function_is_not_called_again_after_a_signal(on_error: OnError) -> None:
    calls = []

    def function(completions: list[str]) -> list[float]:
        calls.append(len(completions))
        os.kill(os.getpid(), signal.SIGTERM)
        return [0.0] * len(completions)

    with pytest.raises(Interrupted):
        _score(RewardScorer([make_reward("judge", function)], on_error=on_error))
    assert calls == [4]


def _scores_again(waiting: Waiting, running: RewardScorer) -> None:
    assert waiting.cancelled.wait(5)
    assert running.score(GROUPS, STATE).groups[0].rewards.tolist() == [[1.0], [1.0]]
    running.close()


def test_an_async_function_is_cancelled_by_a_signal_and_can_be_called_again(on_error: OnError) -> None:
    waiting = Waiting()
    running = RewardScorer([make_reward("judge", waiting)], on_error=on_error)
    with pytest.raises(Interrupted):
        _score(running)
    assert waiting.calls == 1
    _scores_again(waiting, running)


def test_an_async_function_that_is_called_again_is_cancelled_by_a_signal(on_error: OnError) -> None:
    """The second call looks for the row, or the prompt, that makes the function raise."""
    waiting = Waiting(sends_at=2, fails_before=True)
    running = RewardScorer([make_reward("judge", waiting)], on_error=on_error)
    with pytest.raises(Interrupted):
        _score(running)
    assert waiting.calls == 2
    _scores_again(waiting, running)


def test_a_coroutine_that_a_plain_function_passes_on_is_cancelled_by_a_signal() -> None:
    waiting = Waiting()

    def function(completions: list[str]) -> Awaitable[Any]:
        return waiting(completions)

    running = RewardScorer([make_reward("judge", function)])
    with pytest.raises(Interrupted):
        _score(running)
    _scores_again(waiting, running)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_reward_that_exits_ends_the_run_as_a_failure_of_its_own(asynchronous: bool) -> None:
    """`sys.exit(0)` in a reward must not look like a run that is complete."""

    def leaves(completions: list[str]) -> list[float]:
        sys.exit(0)

    async def leaves_later(completions: list[str]) -> list[float]:
        sys.exit(0)

    scorer = RewardScorer([make_reward("leaves", leaves_later if asynchronous else leaves)])
    with pytest.raises(RewardError, match=r"reward function 'leaves' raised .*(SystemExit: 0|sys.exit\(0\))"):
        _score(scorer)
    scorer.close()


def test_coroutines_whose_future_nobody_got_hold_of_are_cancelled_too() -> None:
    """As when a signal cuts the call short that submitted them."""
    loop = EventLoop()
    cancelled = [threading.Event() for _ in range(50)]

    async def wait(seen: threading.Event) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.set()
            raise

    for event in cancelled:
        loop.submit(wait(event))
    loop.cancel()
    assert all(event.wait(5) for event in cancelled)
    loop.close()
