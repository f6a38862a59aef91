"""What changed between two recipes, which decides whether a checkpoint may be continued."""

import dataclasses
from pathlib import Path

from grpo_cli.recipe.compare import changed_keys
from grpo_cli.recipe.load import load_recipe


def test_equal_recipes_have_no_changes(recipe_folder: Path) -> None:
    first, second = (dataclasses.asdict(load_recipe(Path("good.yaml")).recipe) for _ in range(2))
    assert changed_keys(first, second) == {}


def test_every_override_is_a_change_of_its_key_alone(recipe_folder: Path) -> None:
    before = dataclasses.asdict(load_recipe(Path("good.yaml")).recipe)
    overrides = ("grpo.beta=0.5", "generation.stop=[a]", "train.max_steps=3", "dataset.arguments={}")
    after = dataclasses.asdict(load_recipe(Path("good.yaml"), overrides).recipe)
    assert changed_keys(before, after) == {
        "grpo.beta": (0.0, 0.5),
        "generation.stop": ([], ["a"]),
        "train.max_steps": (None, 3),
    }


def test_a_section_that_appears_is_one_change(recipe_folder: Path) -> None:
    before = dataclasses.asdict(load_recipe(Path("good.yaml")).recipe)
    after = dataclasses.asdict(load_recipe(Path("good.yaml"), ["eval.dataset.name=prompts.jsonl"]).recipe)
    assert changed_keys(before, after) == {"eval.dataset": (None, after["eval"]["dataset"])}
    assert changed_keys(after, before) == {"eval.dataset": (after["eval"]["dataset"], None)}


def test_keys_are_dotted_at_any_depth_and_in_the_order_of_the_recipe() -> None:
    before = {"a": {"b": {"c": 1, "d": 2}, "e": 3}, "f": 4}
    after = {"f": 5, "a": {"e": 4, "b": {"d": 3, "c": 1}}}
    changes = changed_keys(before, after)
    assert list(changes.items()) == [("a.b.d", (2, 3)), ("a.e", (3, 4)), ("f", (4, 5))]


def test_lists_are_compared_as_a_whole() -> None:
    before = {"rewards": [{"name": "x", "parameters": {"limit": 1}}]}
    after = {"rewards": [{"name": "x", "parameters": {"limit": 2}}]}
    assert changed_keys(before, after) == {"rewards": (before["rewards"], after["rewards"])}


def test_a_key_that_is_not_there_counts_as_null() -> None:
    assert changed_keys({"a": {}}, {"a": {"new": None, "other": 0}}) == {"a.other": (None, 0)}
    assert changed_keys({"a": 1}, {}) == {"a": (1, None)}
