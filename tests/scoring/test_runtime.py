"""Several rewards at once, and what happens when one fails."""

import asyncio
import math
import threading
import time
from typing import Any, Literal

import pytest
import torch
from scoring.scoring_groups import STATE, group

from grpo_cli.errors import RewardError
from grpo_cli.metrics import Sum
from grpo_cli.scoring.reward import make_reward
from grpo_cli.scoring.runtime import RewardScorer
from grpo_cli.types import LoggedColumn

GROUPS = [group(0, "p", ["a", "bb"]), group(1, "q", ["ccc", "dddd"]), group(2, "r", ["e", "f"])]


def scorer(on_error: Literal["stop", "drop"] = "stop", **functions: Any) -> RewardScorer:
    return RewardScorer([make_reward(name, function) for name, function in functions.items()], on_error=on_error)


def length(completions: list[str]) -> list[float]:
    return [float(len(text)) for text in completions]


def test_columns_stand_in_the_order_of_the_recipe_whatever_is_async() -> None:
    async def judge(completions: list[str]) -> list[float]:
        await asyncio.sleep(0)
        return [-1.0] * len(completions)

    running = scorer(length=length, judge=judge, twice=lambda completions: [2 * each for each in length(completions)])
    scores = running.score(GROUPS, STATE)
    running.close()
    assert running.names == ("length", "judge", "twice")
    assert scores.groups[1].rewards.tolist() == [[3.0, -1.0, 6.0], [4.0, -1.0, 8.0]]
    assert [scored.group for scored in scores.groups] == GROUPS


def test_rewards_do_not_depend_on_how_groups_are_scored_together() -> None:
    running = scorer(length=length)
    together = [scored.rewards for scored in running.score(GROUPS, STATE).groups]
    apart = [running.score([each], STATE).groups[0].rewards for each in GROUPS]
    assert all(torch.equal(one, other) for one, other in zip(together, apart, strict=True))


def test_no_groups_give_no_scores_and_call_nothing() -> None:
    scores = scorer(bad=lambda **_: 1 / 0).score([], STATE)
    assert (scores.groups, scores.metrics, scores.problems) == ((), {}, ())


def test_async_rewards_wait_together() -> None:
    """Three coroutines that each wait for the other two can only end if they run at the same time."""
    barrier = asyncio.Barrier(3)

    async def meet(completions: list[str]) -> list[float]:
        await asyncio.wait_for(barrier.wait(), 10)
        return [1.0] * len(completions)

    running = scorer(a=meet, b=meet, c=meet)
    scores = running.score(GROUPS[:1], STATE)
    running.close()
    assert scores.groups[0].rewards.tolist() == [[1.0] * 3] * 2


def test_plain_functions_run_in_the_calling_thread_while_coroutines_wait() -> None:
    """Each of the two waits for the other, whichever the recipe names first."""
    started, released = threading.Event(), threading.Event()

    def plain(completions: list[str]) -> list[float]:
        here = started.wait(10) and threading.current_thread() is threading.main_thread()
        released.set()
        return [float(here)] * len(completions)

    async def waits(completions: list[str]) -> list[float]:
        started.set()
        return [float(await asyncio.to_thread(released.wait, 10))] * len(completions)

    running = scorer(plain=plain, waits=waits)
    scores = running.score(GROUPS[:1], STATE)
    running.close()
    assert scores.groups[0].rewards.tolist() == [[1.0, 1.0]] * 2


def test_one_loop_serves_all_steps_and_callers_with_a_loop_of_their_own() -> None:
    loops: set[int] = set()

    async def judge(completions: list[str]) -> list[float]:
        loops.add(id(asyncio.get_running_loop()))
        return [0.0] * len(completions)

    running = scorer(judge=judge)
    running.score(GROUPS, STATE)
    thread = threading.Thread(target=running.score, args=(GROUPS, STATE))
    thread.start()
    thread.join()

    async def caller() -> None:
        running.score(GROUPS, STATE)

    asyncio.run(caller())
    running.close()
    assert len(loops) == 1


def test_time_is_counted_per_function() -> None:
    async def slow(completions: list[str]) -> list[float]:
        await asyncio.sleep(0.03)
        return [0.0] * len(completions)

    def busy(completions: list[str]) -> list[float]:
        time.sleep(0.03)
        return [0.0] * len(completions)

    running = scorer(slow=slow, busy=busy, length=length)
    metrics = running.score(GROUPS, STATE).metrics
    running.close()
    seconds = {name: value for name, value in metrics.items() if isinstance(value, Sum)}
    assert seconds.keys() == {"time/reward/slow", "time/reward/busy", "time/reward/length"}
    assert seconds["time/reward/slow"].value >= 0.03
    assert seconds["time/reward/busy"].value >= 0.03
    assert seconds["time/reward/length"].value < 0.03


def test_two_functions_that_log_one_column_keep_both() -> None:
    def first(completions: list[str], log_extra: Any) -> list[float]:
        log_extra("note", completions)
        return length(completions)

    def second(completions: list[str], log_extra: Any) -> list[float]:
        log_extra("note", [1] * len(completions))
        return length(completions)

    scores = scorer(first=first, second=second).score(GROUPS[:1], STATE)
    assert scores.groups[0].extras == {("first", "note"): ("a", "bb"), ("second", "note"): (1, 1)}


# What a function must not return. Each message names the function, the row and the value.


@pytest.mark.parametrize(
    ("bad", "shown"),
    [
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (1e39, "1e+39"),
        ("1.0", "'1.0' (str)"),
        ([1.0], "[1.0] (list)"),
        (1j, "1j (complex)"),
        (10**400, f"1{'0' * 76}... (int)"),
    ],
)
def test_a_value_that_is_not_allowed_names_function_row_and_value(bad: Any, shown: str) -> None:
    def function(completions: list[str]) -> list[Any]:
        return [bad if text == "dddd" else 1.0 for text in completions]

    with pytest.raises(RewardError) as caught:
        scorer(judge=function).score(GROUPS, STATE)
    assert str(caught.value) == (
        f"reward function 'judge' returned {shown} for prompt 0:1, completion 1; allowed is a finite number, or None where it "
        "does not apply"
    )


def test_nan_in_a_tensor_is_found_too() -> None:
    with pytest.raises(RewardError, match="returned nan for prompt 0:0, completion 0"):
        scorer(judge=lambda completions: torch.full((len(completions),), math.nan)).score(GROUPS, STATE)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            [1.0, 2.0],
            (
                "reward function 'judge' returned 2 values for the 6 completions of prompts 0:0 to 0:2: [1.0, 2.0] (list)\n"
                "  hint: return one value per completion, in the order of `completions`; None where the reward does not apply"
            ),
        ),
        (
            1.5,
            (
                "reward function 'judge' returned 1.5 for prompts 0:0 to 0:2; allowed is a list with one number or None per "
                "completion"
            ),
        ),
        (
            {"reward": 1},
            (
                "reward function 'judge' returned {'reward': 1} (dict) for prompts 0:0 to 0:2; allowed is a list with one number or "
                "None per completion"
            ),
        ),
        (
            torch.tensor(1.0),
            (
                "reward function 'judge' returned tensor(1.) (Tensor) for prompts 0:0 to 0:2; allowed is a list with one number or "
                "None per completion"
            ),
        ),
    ],
)
def test_a_container_that_is_not_allowed_names_function_rows_and_value(returned: Any, message: str) -> None:
    with pytest.raises(RewardError) as caught:
        scorer(judge=lambda **_: returned).score(GROUPS, STATE)
    assert str(caught.value) == message


async def fails_on_long_async(completions: list[str]) -> list[float]:
    return fails_on_long(completions)


def fails_on_long(completions: list[str]) -> list[float]:
    if any(len(text) > 3 for text in completions):
        raise KeyError("too\nlong")
    return length(completions)


@pytest.mark.parametrize("function", [fails_on_long, fails_on_long_async])
def test_an_exception_names_function_and_row_and_keeps_its_cause(function: Any) -> None:
    running = scorer(judge=function)
    with pytest.raises(RewardError) as caught:
        running.score(GROUPS, STATE)
    running.close()
    assert str(caught.value) == (
        r"reward function 'judge' raised KeyError: 'too\nlong' for prompt 0:1, completion 1"
        "\n  hint: --debug shows the traceback; `rewards.on_error: drop` leaves such prompts out of the step"
    )
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_exception_that_no_single_row_causes_is_reported_without_row() -> None:
    def function(completions: list[str]) -> list[float]:
        if len(completions) > 1:
            raise RuntimeError
        return [0.0]

    with pytest.raises(RewardError) as caught:
        scorer(judge=function).score(GROUPS, STATE)
    assert caught.value.message == "reward function 'judge' raised RuntimeError"
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_wrong_logging_is_an_error_of_the_function() -> None:
    def extra(completions: list[str], log_extra: Any) -> list[float]:
        log_extra("note", ["only one"])
        return length(completions)

    def metric(completions: list[str], log_metric: Any) -> list[float]:
        log_metric("accuracy", math.nan)
        return length(completions)

    with pytest.raises(RewardError, match=r"ValueError: log_extra\('note', ...\) got 1 values for 6 completions"):
        scorer(judge=extra).score(GROUPS, STATE)
    with pytest.raises(RewardError, match=r"log_metric\('accuracy', ...\) got nan; allowed is a finite number"):
        scorer(judge=metric).score(GROUPS, STATE)


def test_a_coroutine_is_cancelled_when_another_reward_stops_the_run() -> None:
    started, cancelled = threading.Event(), threading.Event()

    def bad(completions: list[str]) -> list[float]:
        started.wait(10)
        return [math.nan] * len(completions)

    async def endless(completions: list[str]) -> list[float]:
        started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return [0.0]

    running = scorer(bad=bad, endless=endless)
    with pytest.raises(RewardError, match="'bad' returned nan"):
        running.score(GROUPS, STATE)
    assert cancelled.wait(5)
    running.close()


# With `drop`, a failing function costs its prompts, not the run.


@pytest.mark.parametrize("function", [fails_on_long, fails_on_long_async])
def test_drop_leaves_out_the_prompts_that_a_function_raises_on(function: Any) -> None:
    running = scorer("drop", length=length, judge=function)
    scores = running.score(GROUPS, STATE)
    running.close()
    assert [scored.dropped for scored in scores.groups] == [False, True, False]
    assert scores.groups[0].rewards.tolist() == [[1.0, 1.0], [2.0, 2.0]]
    assert scores.groups[1].rewards.isnan().all()
    assert scores.groups[1].rewards.shape == (2, 2)
    assert scores.problems == (r"prompt 0:1 is left out: reward function 'judge' raised KeyError: 'too\nlong'",)


def test_drop_leaves_out_the_prompts_with_a_bad_value_without_calling_again() -> None:
    calls = []

    def function(completions: list[str], log_extra: Any) -> list[float]:
        calls.append(len(completions))
        log_extra("seen", completions)
        return [math.nan if text == "e" else 1.0 for text in completions]

    scores = scorer("drop", judge=function).score(GROUPS, STATE)
    assert calls == [6]
    assert [scored.dropped for scored in scores.groups] == [False, False, True]
    assert scores.problems[0].startswith("prompt 0:2 is left out: reward function 'judge' returned nan for prompt 0:2")
    assert scores.groups[2].extras == {("judge", "seen"): ("e", "f")}


def test_drop_keeps_what_was_logged_for_the_prompts_that_stay() -> None:
    def function(completions: list[str], log_extra: Any, log_metric: Any) -> list[float]:
        log_extra("seen", completions)
        log_metric("calls", 1)
        return fails_on_long(completions)

    scores = scorer("drop", judge=function).score(GROUPS, STATE)
    column = LoggedColumn("judge", "seen")
    assert [scored.extras for scored in scores.groups] == [{column: ("a", "bb")}, {}, {column: ("e", "f")}]
    assert scores.metrics["calls"].result() == 1.0


def test_drop_treats_a_wrong_length_as_a_failure_of_every_prompt_it_happens_on() -> None:
    scores = scorer("drop", judge=lambda **_: [0.0]).score(GROUPS, STATE)
    assert all(scored.dropped for scored in scores.groups)
    assert len(scores.problems) == 3
    scores = scorer("drop", judge=lambda **_: [0.0] * 2).score(GROUPS, STATE)
    assert not any(scored.dropped for scored in scores.groups)  # two is right for each prompt alone
    assert scores.problems == (
        (
            "called again prompt by prompt: reward function 'judge' returned 2 values for the 6 completions of prompts 0:0 to 0:2: "
            "[0.0, 0.0] (list)"
        ),
    )


def test_drop_does_not_excuse_a_parameter_that_is_never_there() -> None:
    def function(completions: list[str], label: list[str]) -> list[float]:
        return length(completions)

    with pytest.raises(RewardError, match="needs 'label'"):
        scorer("drop", judge=function).score(GROUPS, STATE)


# Names


def test_names_must_differ_and_exist() -> None:
    with pytest.raises(RewardError, match="two rewards are named 'a'"):
        RewardScorer([make_reward("a", length), make_reward("a", length)])
    with pytest.raises(RewardError, match="there is no reward"):
        RewardScorer([])
