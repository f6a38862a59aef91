"""A folder with a recipe that is fine, and a function that reports what is wrong with changes to it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_cli.errors import RecipeError
from grpo_cli.recipe.load import load_recipe

GOOD = """\
model: {name_or_path: org/model}
dataset: {name: prompts.jsonl}
rewards: {reward_funcs: [table_rewards.brevity]}
train: {prompts_per_step: 4}
"""

REWARDS = """\
from math import sqrt

LIMIT = 20

def brevity(completions, **kwargs):
    return [float(-len(each)) for each in completions]

async def politeness(completions, **kwargs):
    return [sqrt(LIMIT)] * len(completions)
"""


@pytest.fixture
def recipe_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with `good.yaml`, four prompts and two reward functions."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.yaml").write_text(GOOD)
    (tmp_path / "table_rewards.py").write_text(REWARDS)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n' * 4)
    return tmp_path


Report = Callable[..., str]


@pytest.fixture
def report(recipe_folder: Path) -> Report:
    """Write a recipe that extends `good.yaml` (so its own lines count from 2) and give all that is reported about it."""

    def problems(changes: str, *overrides: str) -> str:
        (recipe_folder / "recipe.yaml").write_text(f"extends: good.yaml\n{changes}")
        try:
            load_recipe(Path("recipe.yaml"), overrides)
        except RecipeError as error:
            return str(error)
        return ""

    return problems
