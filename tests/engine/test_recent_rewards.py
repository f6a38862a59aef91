"""What reward functions are told of the latest rewards."""

import json
import statistics

import pytest
import torch
from scoring.scoring_groups import group

from grpo_cli.engine.recent_rewards import GENERATIONS, RewardMemory
from grpo_cli.types import ScoredGroup


def scored(*rewards: tuple[float, float], failed: tuple[str, ...] = ()) -> ScoredGroup:
    return ScoredGroup(
        group=group(0, "p", ["a"] * len(rewards)), rewards=torch.tensor(rewards), extras={}, failed=failed
    )


def test_mean_and_deviation_are_those_of_all_completions_of_the_last_generations() -> None:
    memory = RewardMemory(["a", "b"])
    assert memory.recent() == {}
    values = [[float(step), float(step) / 7] for step in range(GENERATIONS + 3)]
    for pair in values:
        memory.observe(memory.sums([scored(*((one, torch.nan) for one in pair))]))
    flat = [one for pair in values[3:] for one in pair]
    told = memory.recent()
    assert told.keys() == {"a"}, "the other one has never applied"
    assert told["a"].count == 2 * GENERATIONS
    assert told["a"].mean == pytest.approx(statistics.fmean(flat))
    assert told["a"].std == pytest.approx(statistics.pstdev(flat))


def test_what_stands_in_the_place_of_a_failure_is_not_remembered() -> None:
    memory = RewardMemory(["a", "b"])
    memory.observe(memory.sums([scored((1.0, 2.0)), scored((3.0, -9.0), failed=("b",))]))
    told = memory.recent()
    assert (told["a"].mean, told["b"].mean, told["b"].count) == (2.0, 2.0, 1)


def test_it_is_restored_by_name_in_a_run_with_other_rewards() -> None:
    memory = RewardMemory(["a", "b"])
    memory.observe(memory.sums([scored((1.0, 2.0))]))
    other = RewardMemory(["new", "b"])
    other.load_state_dict(json.loads(json.dumps(memory.state_dict())))
    assert {name: one.mean for name, one in other.recent().items()} == {"b": 2.0}
    other.observe(other.sums([scored((5.0, 4.0))]))
    assert {name: one.mean for name, one in other.recent().items()} == {"new": 5.0, "b": 3.0}
