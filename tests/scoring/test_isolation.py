"""Reward functions in processes of their own: whatever they do there costs at most their own batch."""

import datetime as dt
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from scoring.scoring_groups import STATE, group

from grpo_cli.errors import RewardError
from grpo_cli.metrics import Mean
from grpo_cli.recipe.schema import RewardFunction, RewardsSection
from grpo_cli.scoring.functions import load_rewards
from grpo_cli.scoring.isolation.worker import MOST_PROCESSES
from grpo_cli.scoring.runtime import RewardScorer

HERE = Path(__file__).parent
GOOD = [group(0, "p", ["a", "bb"], truth=1), group(1, "q", ["ccc", "dddd"], truth=2)]
BAD = group(2, "r", ["e", "bad"], truth=3)
LENGTHS = [[[1.0], [2.0]], [[3.0], [4.0]]]

Open = Callable[..., RewardScorer]


def children() -> set[psutil.Process]:
    """This process's, and theirs."""
    return set(psutil.Process().children(recursive=True))


@pytest.fixture
def opened() -> Iterator[Open]:
    """Make scorers of functions in `misbehaving`, and close them."""
    scorers: list[RewardScorer] = []
    before = children()

    def make(name: str, *, on_error: Any = "drop", error_value: float | None = None, **keys: Any) -> RewardScorer:
        entry = RewardFunction(path=f"misbehaving.{name}", **{"isolated": True, **keys})
        section = RewardsSection(reward_funcs=[entry], on_error=on_error, error_value=error_value)
        rewards = load_rewards(section, folder=HERE, device="cpu")
        scorers.append(RewardScorer(rewards, on_error=on_error, error_value=error_value))
        return scorers[-1]

    yield make
    for scorer in scorers:
        scorer.close()
    assert children() == before


@pytest.mark.parametrize(
    ("name", "limits", "message"),
    [
        ("exits", {}, "raised SystemExit: 3"),
        ("exits_hard", {}, "ended its process with exit code 7"),
        ("crashes", {}, "ended its process by SIGSEGV"),
        ("raises", {}, "raised LookupError: no such word"),
        ("sleeps", {"timeout": 1.0}, "took longer than 1 s and was ended"),
        ("balloons", {"memory_limit": 0.5}, "took more than its `memory_limit` of 0.5 GiB and was ended"),
        ("multiplies", {}, f"had more than {MOST_PROCESSES} processes and was ended"),
        ("says_last_words", {}, "ended its process with exit code 1; the last that it printed: the index is missing"),
    ],
)
@pytest.mark.parametrize("per_prompt", [False, True])
def test_what_a_function_does_costs_its_own_batch_and_not_the_run(
    opened: Open, name: str, limits: dict[str, Any], message: str, per_prompt: bool
) -> None:
    scorer = opened(name, per_prompt=per_prompt, **limits)
    scores = scorer.score([*GOOD, BAD], STATE)
    assert [one.dropped for one in scores.groups] == [False, False, True]
    assert [one.rewards.tolist() for one in scores.groups[:2]] == LENGTHS
    assert scores.problems == (f"prompt 0:2 is left out: reward function {name!r} {message}",)
    assert scores.failed_prompts == 1
    assert scores.metrics[f"reward/{name}/failed_prompts"].result() == 1
    assert [one.rewards.tolist() for one in scorer.score(GOOD, STATE).groups] == LENGTHS


@pytest.mark.parametrize("name", ["prints", "forks"])
def test_what_does_no_harm_in_a_process_of_its_own_is_allowed(opened: Open, name: str) -> None:
    scorer = opened(name, timeout=60)
    for _ in range(2):
        scores = scorer.score([*GOOD, BAD], STATE)
        assert [one.rewards.tolist() for one in scores.groups] == [*LENGTHS, [[1.0], [3.0]]]


def test_everything_that_a_function_has_started_ends_with_it(opened: Open, tmp_path: Path) -> None:
    scorer = opened("leaves_children", timeout=5, per_prompt=True, parameters={"folder": str(tmp_path)})
    assert scorer.score([BAD], STATE).groups[0].dropped
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    gone = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    assert all(one.status() == psutil.STATUS_ZOMBIE for one in gone)


def test_what_a_function_has_started_ends_with_it_if_it_ends_itself(opened: Open, tmp_path: Path) -> None:
    scorer = opened("leaves_and_exits", parameters={"folder": str(tmp_path)})
    assert "ended its process with exit code 4" in scorer.score([BAD], STATE).problems[0]
    pid = int((tmp_path / "pids").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_processes_that_have_ended_are_not_counted(opened: Open) -> None:
    scorer = opened("leaves_orphans")
    for _ in range(2):
        assert [one.rewards.tolist() for one in scorer.score(GOOD, STATE).groups] == LENGTHS


def test_a_process_that_takes_a_little_more_with_every_call_is_replaced(opened: Open) -> None:
    scorer = opened("leaks", memory_limit=0.5)
    processes: list[float] = []
    deadline = time.monotonic() + 60
    while len(set(processes)) < 2 and time.monotonic() < deadline:
        processes.append(scorer.score(GOOD, STATE).groups[0].rewards[0].item())
        time.sleep(0.1)
    assert len(set(processes)) == 2
    assert len(processes) < 40


def test_a_function_that_never_answers_is_not_waited_for_once_for_each_prompt(opened: Open, tmp_path: Path) -> None:
    """Once for all, then for three prompts; the other twenty are given up."""
    scorer = opened("counts_and_sleeps", timeout=1, parameters={"folder": str(tmp_path)})
    scores = scorer.score([group(number, "p", ["bad"]) for number in range(23)], STATE)
    assert all(one.dropped for one in scores.groups)
    assert len(list(tmp_path.iterdir())) == 4


def test_what_a_function_raises_is_one_line_of_bounded_length(opened: Open) -> None:
    (problem,) = opened("shouts").score(GOOD[:1], STATE).problems
    assert problem.startswith("prompt 0:0 is left out: reward function 'shouts' raised ValueError: [2Jloud loud")
    assert len(problem) < 600


def test_weights_are_no_state(opened: Open) -> None:
    scorer = opened("Weights")
    assert scorer.score(GOOD, STATE).groups[0].rewards.tolist() == LENGTHS[0]
    assert scorer.state_dict() == {}


def test_a_failure_stops_the_run_if_it_is_to(opened: Open) -> None:
    with pytest.raises(RewardError, match="reward function 'exits_hard' ended its process with exit code 7") as caught:
        opened("exits_hard", on_error="stop").score([*GOOD, BAD], STATE)
    assert "rewards.on_error" in str(caught.value)


def test_a_failure_that_stops_the_run_names_the_row_and_where_it_was_raised(opened: Open) -> None:
    with pytest.raises(RewardError, match="raised LookupError: no such word for prompt 0:2, completion 1") as caught:
        opened("raises", on_error="stop").score([*GOOD, BAD], STATE)
    assert caught.value.__cause__ is not None
    assert "misbehaving.py" in caught.value.__cause__.__notes__[0]


def test_completions_that_a_function_failed_on_can_have_a_value(opened: Open) -> None:
    scores = opened("exits_hard", on_error="value", error_value=-2.0).score([*GOOD, BAD], STATE)
    assert [one.rewards.tolist() for one in scores.groups] == [*LENGTHS, [[-2.0], [-2.0]]]
    assert not any(one.dropped for one in scores.groups)
    assert scores.problems[0].startswith("prompt 0:2 gets -2: ")


def test_what_a_function_returns_and_logs_comes_over(opened: Open) -> None:
    scores = opened("tells").score(GOOD, STATE)
    assert [one.rewards.tolist() for one in scores.groups] == [[[1.0], [1.0]], [[2.0], [2.0]]]
    assert scores.groups[1].extras == {("tells", "answer"): ("CCC", "DDDD"), ("tells", "odd"): (0.5, 0.5)}
    assert scores.metrics["tell/length"] == Mean(2.5 * 4, 4)


@pytest.mark.parametrize(
    ("what", "expected"),
    [("none", [[torch.nan], [torch.nan]]), ("array", [[1.0], [1.0]]), ("numbers", [[1.5], [1.0]])],
)
def test_what_a_reward_can_be(opened: Open, what: str, expected: list[list[float]]) -> None:
    scores = opened("returns", parameters={"what": what}).score(GOOD[:1], STATE)
    assert torch.equal(scores.groups[0].rewards.nan_to_num(), torch.tensor(expected).nan_to_num())
    assert torch.equal(scores.groups[0].rewards.isnan(), torch.tensor(expected).isnan())


@pytest.mark.parametrize(
    ("thing", "expected"),
    [
        (b"\x00\xff", r"bytes b'\x00\xff'"),
        (dt.date(2026, 1, 2), "date datetime.date(2026, 1, 2)"),
        (
            dt.datetime(2026, 1, 2, 3, 4, tzinfo=dt.UTC),
            "datetime datetime.datetime(2026, 1, 2, 3, 4, tzinfo=datetime.timezone.utc)",
        ),
        (dt.time(1, 2), "time datetime.time(1, 2)"),
        (dt.timedelta(hours=1), "timedelta datetime.timedelta(seconds=3600)"),
        (Decimal("0.10"), "Decimal Decimal('0.10')"),
        (np.arange(3), "list [0, 1, 2]"),
        (Image.new("CMYK", (4, 2)), "PngImageFile <PIL.PngImagePlugin.PngImageFile image mode=RGB size=4x2"),
        ({"a": [1, None, {"b": "c"}]}, "dict {'a': [1, None, {'b': 'c'}]}"),
        (Image.new("RGB", (4, 2)), "PngImageFile <PIL.PngImagePlugin.PngImageFile image mode=RGB size=4x2"),
        (object(), "object cannot be sent to another process; an isolated function can be given numbers, texts"),
    ],
)
def test_what_columns_can_hold_is_given_to_a_function_as_it_is(opened: Open, thing: Any, expected: str) -> None:
    scores = opened("describes").score([group(0, "p", ["a"], thing=thing)], STATE)
    assert expected in scores.problems[0]


@pytest.mark.parametrize("what", ["nan", "words", "short", "nothing"])
def test_what_a_reward_cannot_be_is_told_as_for_a_function_in_the_trainers_process(opened: Open, what: str) -> None:
    messages = []
    for isolated in (True, False):
        with pytest.raises(RewardError) as caught:
            opened("returns", on_error="stop", isolated=isolated, parameters={"what": what}).score(GOOD, STATE)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_coroutines_run_there_too(opened: Open) -> None:
    scores = opened("waits").score(GOOD, STATE)
    assert [one.rewards.tolist() for one in scores.groups] == LENGTHS


def test_calls_of_single_prompts_run_in_as_many_processes_as_may_be(opened: Open, tmp_path: Path) -> None:
    """Each waits for three others."""
    parameters = {"folder": str(tmp_path), "count": 4}
    scorer = opened("meets", on_error="stop", per_prompt=True, concurrency=4, parameters=parameters)
    groups = [group(number, "p", ["a" * number]) for number in range(1, 5)]
    scores = scorer.score(groups, STATE)
    assert [one.rewards.item() for one in scores.groups] == [1, 2, 3, 4]


def test_a_call_is_made_again_as_often_as_it_may_be(opened: Open) -> None:
    """The counter counts before it ends its process; a process that is started anew begins where the last answer left it."""
    scorer = opened("Counter", retries=2)
    assert scorer.score(GOOD, STATE).groups[0].rewards.tolist() == [[1.0], [1.0]]
    scores = scorer.score([BAD], STATE)
    assert scores.groups[0].dropped
    assert scores.metrics["reward/Counter/repeated_calls"].result() == 2
    assert scorer.state_dict() == {"Counter": {"calls": 1}}
    assert scorer.score(GOOD, STATE).groups[0].rewards.tolist() == [[2.0], [2.0]]


def test_the_state_of_an_object_is_kept_and_restored(opened: Open) -> None:
    scorer = opened("Counter", isolated=None, parameters={"start": 5})
    assert scorer.descriptions == ("reward Counter: counts from 5",)
    assert scorer.state_dict() == {"Counter": {"calls": 5}}
    scorer.score(GOOD, STATE)
    kept = scorer.state_dict()
    assert kept == {"Counter": {"calls": 6}}
    scorer.score(GOOD, STATE)
    scorer.load_state_dict(kept)
    assert scorer.score(GOOD, STATE).groups[0].rewards.tolist() == [[7.0], [7.0]]


def test_an_object_with_a_state_is_called_one_at_a_time(opened: Open) -> None:
    with pytest.raises(RewardError, match="found `concurrency: 2` for an object with a state; allowed: 1"):
        opened("Counter", per_prompt=True, concurrency=2)


def test_so_is_one_with_a_state_in_the_trainers_process(opened: Open) -> None:
    with pytest.raises(RewardError, match="found `concurrency: 2` for an object with a state; allowed: 1"):
        opened("Waiting", isolated=None, per_prompt=True, concurrency=2)


def test_every_function_that_fails_on_a_prompt_is_told(opened: Open) -> None:
    entries = [RewardFunction(path=f"misbehaving.{name}", isolated=True) for name in ("exits_hard", "raises")]
    scorer = RewardScorer(
        load_rewards(RewardsSection(reward_funcs=entries), folder=HERE, device="cpu"), on_error="drop"
    )
    scores = scorer.score([BAD], STATE)
    scorer.close()
    assert [problem.partition("'")[2].partition("'")[0] for problem in scores.problems] == ["exits_hard", "raises"]
    assert scores.groups[0].failed == ("exits_hard", "raises")


def test_a_function_that_says_so_is_isolated_and_one_with_limits(opened: Open) -> None:
    before = set(psutil.Process().children())
    opened("Counter", isolated=None)
    opened("exits", isolated=None, timeout=3)
    opened("exits", isolated=None, memory_limit=4)
    opened("exits", isolated=None, calls_per_minute=60)
    assert len(set(psutil.Process().children()) - before) == 4
    opened("exits", isolated=None)
    assert len(set(psutil.Process().children()) - before) == 4


def test_a_timeout_for_a_plain_function_in_the_trainers_process_is_refused(opened: Open) -> None:
    with pytest.raises(RewardError, match="`timeout` has no hold on a plain function in the trainer's process"):
        opened("exits", isolated=False, timeout=3)


def test_what_cannot_be_loaded_is_told(opened: Open) -> None:
    with pytest.raises(
        RewardError, match=r"reward 'Unloadable': Unloadable\(...\) raised OSError: the index is missing"
    ):
        opened("Unloadable")
    with pytest.raises(RewardError, match="`misbehaving` has no `nothing_of_it`"):
        opened("nothing_of_it")
    with pytest.raises(RewardError, match="reward 'exits' has no parameter 'stat'"):
        opened("exits", parameters={"stat": 1})


def test_a_worker_ends_with_its_trainer_even_in_the_middle_of_a_call(tmp_path: Path) -> None:
    program = f"""
import sys
sys.path.insert(0, {str(HERE.parent)!r})
from scoring.test_isolation import BAD, HERE, STATE
from grpo_cli.recipe.schema import RewardFunction, RewardsSection
from grpo_cli.scoring.functions import load_rewards
from grpo_cli.scoring.isolation.worker import MOST_PROCESSES
from grpo_cli.scoring.runtime import RewardScorer
section = RewardsSection(reward_funcs=[RewardFunction(path="misbehaving.sleeps", isolated=True)])
RewardScorer(load_rewards(section, folder=HERE, device="cpu")).score([BAD], STATE)
"""
    trainer = subprocess.Popen([sys.executable, "-c", program])
    own = psutil.Process(trainer.pid)
    deadline = time.monotonic() + 60
    while not (workers := own.children(recursive=True)) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1)  # it is in the call by now, or will be told that there is nobody to answer
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.wait()
    assert workers
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert alive == []
