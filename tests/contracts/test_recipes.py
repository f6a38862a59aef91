"""The recipes that come with the package: each is fine, explains itself, and brings what it names."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from optional_packages import needs_reasoning_gym

from grpo_cli.data.sources import load_rows
from grpo_cli.recipe.load import LoadedRecipe, load_recipe
from grpo_cli.scoring.functions import are_independent, load_rewards
from grpo_cli.scoring.runtime import RewardScorer
from rewards.code import PassedTests
from rewards.confinement.choice import choose
from rewards.confinement.limits import Limits

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
PATHS = sorted(RECIPES.glob("*.yaml"))
LINKED = {
    "quickstart",
    "tldr",
    "dr_grpo",
    "dapo",
    "gspo",
    "math",
    "multitask",
    "code",
    "vllm",
    "lora",
    "qlora",
    "reasoning",
    "vlm",
    "vlm_tiny",
    "qwen2.5-72b",
}
GENERATED = {"grpo_cli.data.reasoning.questions": "reasoning_gym", "grpo_cli.data.digits.pictures": "sklearn"}
"""What makes rows without a network, and the package that it needs."""

UNCONFINED = bool(choose(Limits()).open)

each_recipe = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def header(path: Path) -> list[str]:
    """The comment at the top, line by line."""
    lines = path.read_text(encoding="utf-8").splitlines()
    end = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return [line.removeprefix("#").strip() for line in lines[:end]]


def bundled_rows(loaded: LoadedRecipe) -> list[dict[str, Any]]:
    text = (loaded.folder / loaded.recipe.dataset.name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def is_bundled(loaded: LoadedRecipe) -> bool:
    return (loaded.folder / loaded.recipe.dataset.name).is_file()


def is_model_bundled(loaded: LoadedRecipe) -> bool:
    return (loaded.folder / loaded.recipe.model.name_or_path).is_dir()


def columns(loaded: LoadedRecipe) -> Iterable[str]:
    """What a recipe's rows are known to have: bundled and generated ones are looked at, those of a hub are not."""
    if is_bundled(loaded):
        return bundled_rows(loaded)[0]
    if loaded.recipe.dataset.name not in GENERATED:
        return loaded.recipe.dataset.columns
    pytest.importorskip(GENERATED[loaded.recipe.dataset.name])
    return load_rows(loaded.recipe.dataset, folder=loaded.folder).column_names or ()


def test_all_recipes_are_there() -> None:
    assert {path.stem for path in PATHS} == LINKED


@each_recipe
def test_a_recipe_is_fine_wherever_it_is_started_from(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_recipe(path).recipe.run_name == path.stem


@each_recipe
def test_a_header_says_what_it_needs_how_to_run_it_and_what_to_expect(path: Path) -> None:
    lines = header(path)
    assert lines[0].endswith(".")
    labels = [line.partition(":")[0] for line in lines]
    assert "Hardware" in labels
    assert {"Result", "Expect"} & set(labels)
    command = re.compile(rf"Command: .*(grpo train|sbatch scripts/slurm/\w+\.sbatch) recipes/{re.escape(path.name)}\b")
    assert any(command.match(line) for line in lines)


@each_recipe
def test_rewards_take_the_parameters_and_columns_that_the_recipe_gives_them(path: Path) -> None:
    if path.stem == "code" and UNCONFINED:
        pytest.skip("programs cannot be confined on this machine, and the reward refuses to be made")
    loaded = load_recipe(path)
    scorer = RewardScorer(load_rewards(loaded.recipe.rewards, folder=loaded.folder, device="cpu"))
    scorer.check_columns(columns(loaded))
    scorer.close()


@pytest.mark.parametrize("name", ["quickstart", "multitask", "code"])
def test_bundled_rows_are_different_prompts_of_one_shape(name: str) -> None:
    rows = bundled_rows(load_recipe(RECIPES / f"{name}.yaml"))
    assert len({row["prompt"][0]["content"] for row in rows}) == len(rows) >= 24
    assert {tuple(row) for row in rows} == {tuple(rows[0])}
    assert {(len(row["prompt"]), row["prompt"][0]["role"]) for row in rows} == {(1, "user")}


def test_every_bundled_file_belongs_to_a_recipe() -> None:
    loaded = [load_recipe(path) for path in PATHS]
    named = {(one.folder / one.recipe.dataset.name).resolve() for one in loaded if is_bundled(one)}
    named |= {(one.folder / one.recipe.model.name_or_path).resolve() for one in loaded if is_model_bundled(one)}
    assert named == {path.resolve() for path in (RECIPES / "data").iterdir()}


def test_each_task_of_multitask_has_exactly_one_reward_that_applies() -> None:
    loaded = load_recipe(RECIPES / "multitask.yaml")
    rows = bundled_rows(loaded)
    right = [row["ground_truth"] if row["task"] == "arithmetic" else "word " * int(row["ground_truth"]) for row in rows]
    arguments = {
        "completions": [[{"role": "assistant", "content": text}] for text in right],
        "task": [row["task"] for row in rows],
        "ground_truth": [row["ground_truth"] for row in rows],
    }
    rewards = load_rewards(loaded.recipe.rewards, folder=loaded.folder, device="cpu")
    returned = {reward.name: reward.function(**arguments) for reward in rewards}
    for task, values in returned.items():
        assert values == [1.0 if row["task"] == task else None for row in rows]


def test_wrong_answers_of_multitask_earn_less() -> None:
    loaded = load_recipe(RECIPES / "multitask.yaml")
    arithmetic, word_count = load_rewards(loaded.recipe.rewards, folder=loaded.folder, device="cpu")
    texts = ["3 + 4 is 8", "no number", "7, not 8", "3 + 4 = 7"]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    assert arithmetic.function(
        completions=completions, task=["arithmetic"] * 4, ground_truth=["7"] * 4, prompts=[]
    ) == [0.0, 0.0, 0.0, 1.0]
    assert word_count.function(
        completions=completions, task=["word_count"] * 4, ground_truth=["3"] * 4
    ) == pytest.approx([0.8, 0.9, 1.0, 0.8])


@pytest.mark.skipif(UNCONFINED, reason="programs cannot be confined on this machine")
def test_the_reference_of_each_task_of_code_passes_its_tests_and_that_of_others_does_not() -> None:
    loaded = load_recipe(RECIPES / "code.yaml")
    rows = bundled_rows(loaded)
    [entry] = loaded.recipe.rewards.reward_funcs
    reward = PassedTests(**entry.parameters)
    answers = [f"```python\n{row['reference']}\n```" for row in rows]
    tests = [row["tests"] for row in rows]
    assert reward(completions=answers, tests=tests) == [1.0] * len(rows)
    others = reward(completions=answers, tests=[*tests[1:], tests[0]])
    assert all(share is not None and share < 1 for share in others)
    assert {"assert" in each for each in tests} == {True, False}


@needs_reasoning_gym
def test_no_question_of_reasoning_is_both_trained_and_evaluated_on() -> None:
    loaded = load_recipe(RECIPES / "reasoning.yaml")
    assert loaded.recipe.eval.dataset is not None
    trained, held_out = (
        {row["prompt"][0]["content"] for row in load_rows(section, folder=loaded.folder)}
        for section in (loaded.recipe.dataset, loaded.recipe.eval.dataset)
    )
    assert trained
    assert len(held_out) >= 200
    assert trained.isdisjoint(held_out)


def test_of_many_processes_each_scores_but_where_rewards_limit_themselves_or_are_a_recipe_s_own() -> None:
    seeing_all = set()
    for path in PATHS:
        loaded = load_recipe(path, [])
        if not are_independent(loaded.recipe.rewards, folder=loaded.folder):
            seeing_all.add(path.stem)
    assert seeing_all == {"code", "multitask", "vlm_tiny"}
