"""Whole runs with reward functions in processes of their own: the run goes on, resumes exactly, and learns the same."""

from pathlib import Path
from typing import Any

import psutil
import pytest
from e2e.experiment import Experiment, assert_same_run, completions, make_experiment, records

from grpo_cli.engine.run import run
from grpo_cli.errors import TrainingError
from grpo_cli.recipe.load import load_recipe

pytestmark = [pytest.mark.slow]

MORE_REWARDS = '''

def deadly(completions, number, **_):
    """End the process over every third row."""
    if any(each % 3 == 0 for each in number):
        os._exit(9)
    return [0.0 for _ in completions]


def always_deadly(completions, **_):
    os._exit(9)


class Going(Counting):
    """Goes by what the run has come to."""

    def __call__(self, completions, trainer_state, **_):
        recent = trainer_state.recent_rewards.get("few_letters")
        bonus = 0.0 if recent is None else 0.001 * recent.mean + 0.0001 * recent.count + 0.01 * recent.std
        return [one + bonus * (index + 1) for index, one in enumerate(super().__call__(completions))]
'''


def experiment(folder: Path, model: Path, *rewards: Any, **sections: dict[str, Any]) -> Experiment:
    sections["train"] = {"prompts_per_step": 4, "max_steps": 3, **sections.get("train", {})}
    made = make_experiment(
        folder, model, rewards={"reward_funcs": list(rewards), **sections.pop("rewards", {})}, **sections
    )
    with (folder / "my_rewards.py").open("a") as file:
        file.write(MORE_REWARDS)
    return made


def isolated(name: str, **keys: object) -> dict[str, object]:
    return {"path": f"my_rewards.{name}", "isolated": True, **keys}


def test_a_function_that_ends_its_process_costs_its_prompts_and_not_the_run(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    made = experiment(
        tmp_path,
        tiny_model_folder,
        "my_rewards.few_letters",
        isolated("deadly", per_prompt=True, concurrency=2),
        rewards={"on_error": "drop"},
    )
    before = set(psutil.Process().children())
    run(load_recipe(made.recipe))
    told = records(made.output())
    assert len(told) == 3
    # 12 rows, each drawn once in 3 steps of 4; a third of them is deadly.
    assert sum(step["rewards/failed_prompts"] for step in told) == 4
    assert sum(step["rewards/dropped_prompts"] for step in told) == 4
    assert sum(step.get("reward/deadly/failed_prompts", 0) for step in told) == 4
    assert set(psutil.Process().children()) == before


def test_a_value_in_the_place_of_a_failure_goes_into_the_rewards(tiny_model_folder: Path, tmp_path: Path) -> None:
    made = experiment(
        tmp_path,
        tiny_model_folder,
        isolated("deadly", per_prompt=True),
        "my_rewards.few_letters",
        rewards={"on_error": "value", "error_value": -3.0},
    )
    run(load_recipe(made.recipe))
    rows = [row for file in completions(made.output()).values() for row in file]
    failed = [row for row in rows if int(row["prompt_uid"].partition(":")[2]) % 3 == 0]
    assert len(failed) == 8
    assert {row["reward/deadly"] for row in failed} == {-3.0}
    assert {row["reward/deadly"] for row in rows if row not in failed} == {0.0}
    assert all(step["rewards/dropped_prompts"] == 0 for step in records(made.output()))


@pytest.mark.parametrize(
    ("function", "budget", "message"),
    [
        ("always_deadly", 1.0, "a reward function failed on every prompt"),
        ("deadly", 0.25, r"failed on \d of 4 prompts; `rewards.failure_budget` allows less than 0.25 of them"),
    ],
)
def test_a_run_stops_if_functions_fail_on_too_much(
    tiny_model_folder: Path, tmp_path: Path, function: str, budget: float, message: str
) -> None:
    made = experiment(
        tmp_path,
        tiny_model_folder,
        "my_rewards.few_letters",
        isolated(function),
        rewards={"on_error": "drop", "failure_budget": budget},
    )
    with pytest.raises(TrainingError, match=message):
        run(load_recipe(made.recipe))


def test_an_isolated_function_gives_the_run_that_it_gives_in_the_trainers_process(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    """A part of it is scored while other completions are still being sampled."""
    for name, keys in (("own", {"isolated": True}), ("here", {"isolated": False})):
        rewards = ["my_rewards.few_letters", {"path": "my_rewards.Counting", "per_prompt": True, **keys}]
        made = experiment(tmp_path, tiny_model_folder, *rewards)
        run(load_recipe(made.recipe, [f"train.output_dir={made.output(name)}"]))
    mine, theirs = completions(tmp_path / "own"), completions(tmp_path / "here")
    assert {name: sorted(row["reward/Counting"] for row in rows) for name, rows in mine.items()} == {
        name: sorted(row["reward/Counting"] for row in rows) for name, rows in theirs.items()
    }


def test_state_and_recent_rewards_are_resumed_exactly(tiny_model_folder: Path, tmp_path: Path) -> None:
    rewards = ["my_rewards.few_letters", isolated("Going")]
    made = experiment(tmp_path, tiny_model_folder, *rewards)
    run(load_recipe(made.recipe))
    parts = f"train.output_dir={made.output('parts')}"
    run(load_recipe(made.recipe, [parts, "train.max_steps=1", "train.lr_scheduler_type=constant"]))
    run(load_recipe(made.recipe, [parts]), resume="newest")
    assert_same_run(made.output("parts"), made.output())
