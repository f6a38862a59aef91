"""The datasets that a recipe evaluates on: what is said once for all, and over it for one."""

from dataclasses import replace
from pathlib import Path

import pytest

from grpo_cli.recipe.eval_tasks import EvalTask, evaluation_tasks, pass_sizes, possible_metrics
from grpo_cli.recipe.load import dump_recipe, load_recipe
from grpo_cli.recipe.notices import notices
from grpo_cli.recipe.schema import Recipe

DATASETS = """\
extends: good.yaml
eval:
  temperature: 0.5
  num_generations: 4
  datasets:
    math:
      name: prompts.jsonl
      split: "train[:2]"
      reward_funcs: [table_rewards.politeness, {path: table_rewards.brevity, name: brief}]
      reward_weights: [1, 0.5]
      num_generations: 2
      success: {reward: brief, threshold: 0}
      subset_column: level
    chat: {name: prompts.jsonl, temperature: 0, num_generations: 1}
"""


@pytest.fixture
def recipe(recipe_folder: Path) -> Recipe:
    (recipe_folder / "recipe.yaml").write_text(DATASETS)
    return load_recipe(Path("recipe.yaml")).recipe


def by_name(recipe: Recipe) -> dict[str | None, EvalTask]:
    return {task.name: task for task in evaluation_tasks(recipe)}


def test_a_dataset_has_what_is_said_for_all_unless_it_says_otherwise(recipe: Recipe) -> None:
    math, chat = by_name(recipe)["math"], by_name(recipe)["chat"]
    assert (math.settings.temperature, math.settings.num_generations) == (0.5, 2)
    assert (chat.settings.temperature, chat.settings.num_generations) == (0.0, 1)
    assert math.dataset.split == "train[:2]"
    assert math.settings.success is not None
    assert math.settings.success.threshold == 0
    assert chat.settings.success is None
    assert math.key_of("temperature") == "eval.temperature"
    assert math.key_of("num_generations") == "eval.datasets.math.num_generations"


def test_a_dataset_has_the_rewards_of_the_run_unless_it_names_others(recipe: Recipe) -> None:
    math, chat = by_name(recipe)["math"], by_name(recipe)["chat"]
    assert [entry.path for entry in math.rewards.reward_funcs] == ["table_rewards.politeness", "table_rewards.brevity"]
    assert math.rewards.reward_weights == [1, 0.5]
    assert math.has_own_rewards
    assert chat.rewards == recipe.rewards
    assert not chat.has_own_rewards


def test_rewards_of_a_dataset_s_own_are_not_spread_for_one_process_evaluates(recipe: Recipe) -> None:
    assert not by_name(replace(recipe, rewards=replace(recipe.rewards, spread=True)))["math"].rewards.spread


def test_a_dataset_without_a_name_keeps_the_names_of_metrics(recipe_folder: Path) -> None:
    recipe = load_recipe(Path("good.yaml"), ["eval.dataset.name=prompts.jsonl"]).recipe
    (task,) = evaluation_tasks(recipe)
    assert (task.name, task.key, task.prefix, task.label) == (None, "eval.dataset", "eval/", "dataset")
    assert {"eval/reward", "eval/reward/brevity/mean", "eval/avg@1"} <= set(possible_metrics(recipe))


def test_metrics_of_datasets_have_their_names(recipe: Recipe) -> None:
    possible = set(possible_metrics(recipe))
    assert {"eval/reward", "eval/math/reward", "eval/math/reward/brief/mean", "eval/math/pass@2"} <= possible
    assert {"eval/chat/reward/brevity/mean", "eval/chat/completions/clipped_ratio"} <= possible
    assert "eval/chat/reward/brief/mean" not in possible


@pytest.mark.parametrize(("count", "sizes"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))])
def test_the_sizes_are_powers_of_two_and_all(count: int, sizes: tuple[int, ...]) -> None:
    assert pass_sizes(count) == sizes


def test_datasets_are_written_out_and_loaded_again(recipe: Recipe, recipe_folder: Path) -> None:
    (recipe_folder / "written.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(Path("written.yaml")).recipe == recipe


def test_the_command_line_reaches_a_dataset(recipe_folder: Path) -> None:
    (recipe_folder / "recipe.yaml").write_text(DATASETS)
    overrides = ["eval.datasets.math.reward_funcs=[table_rewards.politeness]", "eval.datasets.math.reward_weights=null"]
    recipe = load_recipe(Path("recipe.yaml"), [*overrides, "eval.datasets.math.success=null"]).recipe
    assert [entry.path for entry in by_name(recipe)["math"].rewards.reward_funcs] == ["table_rewards.politeness"]


def test_null_leaves_a_dataset_out(recipe_folder: Path) -> None:
    (recipe_folder / "recipe.yaml").write_text(DATASETS)
    assert list(by_name(load_recipe(Path("recipe.yaml"), ["eval.datasets.math=null"]).recipe)) == ["chat"]


def test_a_metric_that_a_reward_function_may_log_is_let_through(recipe_folder: Path) -> None:
    overrides = ["eval.dataset.name=prompts.jsonl", "eval.best_metric=eval/solved"]
    assert load_recipe(Path("good.yaml"), overrides).recipe.eval.best_metric == "eval/solved"


def test_each_dataset_that_is_trained_on_is_noticed(recipe: Recipe) -> None:
    assert [line.partition(":")[0] for line in notices(recipe)] == ["eval.datasets.chat"]
