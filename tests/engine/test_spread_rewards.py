"""Rewards that each process calls on its own completions: their pace, and what is refused."""

import time
from pathlib import Path

import psutil
import pytest
from e2e.experiment import make_experiment
from engine.threaded_processes import ThreadedProcesses, in_threads
from scoring.scoring_groups import STATE, group

from grpo_cli.engine.distributed import Processes
from grpo_cli.engine.held_out import load_scorers
from grpo_cli.engine.rewards import load_scorer
from grpo_cli.engine.shared_scoring import Scorer, SharedScorer
from grpo_cli.errors import RewardError
from grpo_cli.recipe.load import load_recipe
from grpo_cli.scoring.runtime import RewardScorer

GROUPS = [group(number, "p", ["a", "b"]) for number in range(4)]

ASKED = """

async def asked(completions, **_):
    return [1.0] * len(completions)
"""


@pytest.fixture
def recipe(tmp_path: Path, tiny_model_folder: Path) -> Path:
    made = make_experiment(
        tmp_path,
        tiny_model_folder,
        rewards={
            "spread": True,
            "reward_funcs": [
                {"path": "my_rewards.asked", "per_prompt": True, "concurrency": 4, "calls_per_minute": 1200}
            ],
        },
        eval={"dataset": {"name": "data.jsonl"}},
    )
    with (tmp_path / "my_rewards.py").open("a") as file:
        file.write(ASKED)
    return made.recipe


def test_processes_share_the_calls_of_a_minute_and_the_one_that_evaluates_has_them_all(recipe: Path) -> None:
    """A call begins every 0.05 s; with 8 processes every 0.4 s in each. The first begins at once."""
    loaded = load_recipe(recipe, [])

    def seconds(processes: ThreadedProcesses) -> list[float]:
        training = load_scorer(loaded.recipe.rewards, loaded, processes)
        (evaluating,) = load_scorers(loaded, processes, training)
        if not processes.is_main:
            return []
        found = []
        for scorer in (training, evaluating):
            began = time.monotonic()
            scorer.score(GROUPS, STATE)
            found.append(time.monotonic() - began)
            scorer.close()
        return found

    of_training, of_evaluation = in_threads(8, seconds)[0]
    assert of_training >= 3 * 0.4 - 0.01
    assert 3 * 0.05 - 0.01 <= of_evaluation < 3 * 0.4


@pytest.mark.parametrize(
    ("functions", "said", "each"),
    [
        ("[rewards.length.num_characters, rewards.format.think]", None, True),
        ("[rewards.length.num_characters, {path: my_rewards.few_letters, per_prompt: true}]", None, False),
        ("[rewards.length.num_characters, my_rewards.few_letters]", None, False),
        ("[rewards.length.num_characters, my_rewards.Counting]", None, False),
        ("[rewards.length.num_characters]", False, False),
        ("[my_rewards.few_letters]", True, True),
    ],
)
def test_each_process_scores_if_the_recipe_or_all_functions_say_so(
    recipe: Path, functions: str, said: bool | None, each: bool
) -> None:
    spread = "null" if said is None else str(said).lower()
    loaded = load_recipe(recipe, [f"rewards.reward_funcs={functions}", f"rewards.spread={spread}"])

    def kind(processes: Processes) -> type[Scorer]:
        scorer = load_scorer(loaded.recipe.rewards, loaded, processes)
        scorer.close()
        return type(scorer)

    assert in_threads(2, kind) == [RewardScorer if each else SharedScorer] * 2
    assert kind(Processes(bf16=False)) is RewardScorer


def test_what_was_started_ends_when_a_state_is_refused(recipe: Path) -> None:
    functions = "[{path: my_rewards.few_letters, isolated: true}, my_rewards.Counting]"
    loaded = load_recipe(recipe, [f"rewards.reward_funcs={functions}"])
    before = psutil.Process().children()
    with pytest.raises(RewardError, match="reward 'Counting' has a state"):
        load_scorer(loaded.recipe.rewards, loaded, Processes(bf16=False))
    assert psutil.Process().children() == before
