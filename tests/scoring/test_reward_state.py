"""What a checkpoint keeps of reward objects that have a state."""

from typing import Any

import pytest
from scoring.scoring_groups import STATE, group

from grpo_cli.errors import CheckpointError, RewardError
from grpo_cli.scoring.reward import make_reward
from grpo_cli.scoring.runtime import RewardScorer

GROUPS = [group(0, "p", ["a", "bb"]), group(1, "q", ["ccc", "dddd"])]


def _scorer(**functions: Any) -> RewardScorer:
    return RewardScorer([make_reward(name, function) for name, function in functions.items()])


def _length(completions: list[str]) -> list[float]:
    return [float(len(text)) for text in completions]


class Counter:
    def __init__(self) -> None:
        self.calls: Any = 0

    def __call__(self, completions: list[str]) -> list[float]:
        self.calls += 1
        return [float(self.calls)] * len(completions)

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


def test_a_stateful_reward_continues_where_it_was_saved() -> None:
    first = _scorer(length=_length, counter=Counter())
    first.score(GROUPS, STATE)
    saved = first.state_dict()
    assert saved == {"counter": {"calls": 1}}
    second = _scorer(length=_length, counter=Counter())
    second.load_state_dict(saved)
    assert (
        second.score(GROUPS, STATE).groups[0].rewards.tolist() == first.score(GROUPS, STATE).groups[0].rewards.tolist()
    )


def test_state_of_other_rewards_is_refused() -> None:
    with pytest.raises(CheckpointError) as caught:
        _scorer(length=_length).load_state_dict({"counter": {}})
    assert str(caught.value) == (
        "the checkpoint holds the state of the rewards ['counter']; the rewards of this run that have one are []\n"
        "  hint: resume with the rewards that the run started with"
    )


def test_state_that_is_not_json_is_refused() -> None:
    counter = Counter()
    counter.calls = {1, 2}
    with pytest.raises(RewardError, match=r"reward 'counter': state_dict\(\) must return JSON"):
        _scorer(counter=counter).state_dict()


def test_a_state_does_not_change_when_its_reward_goes_on() -> None:
    counter, later = Counter(), Counter()
    counter.calls = [1]
    running, resumed = _scorer(counter=counter), _scorer(counter=later)
    saved = running.state_dict()
    counter.calls.append(2)
    assert saved == {"counter": {"calls": [1]}}
    resumed.load_state_dict(saved)
    later.calls.append(2)
    assert saved == {"counter": {"calls": [1]}}
