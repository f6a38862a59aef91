"""From `rewards:` of a recipe to callables: shipped functions, functions and classes beside the recipe, models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from scoring.scoring_groups import STATE, group
from tiny_models import build_tiny_tokenizer
from transformers import AutoModelForSequenceClassification, LlamaConfig

from grpo_cli.errors import RewardError
from grpo_cli.recipe.schema import RewardFunction, RewardsSection
from grpo_cli.scoring.functions import are_independent, load_rewards
from grpo_cli.scoring.reward import Reward
from grpo_cli.scoring.runtime import RewardScorer

MODULE = """
import functools


class Threshold:
    def __init__(self, at):
        if at < 0:
            raise ValueError(f"at is {at}")
        self.at = at

    def __call__(self, completions, **kwargs):
        return [float(len(text) >= self.at) for text in completions]


class Named(Threshold):
    def __init__(self):
        super().__init__(1)
        self.__name__ = "its_own_name"


class NotCallable:
    pass


def anything(**kwargs):
    return [kwargs["at"]] * len(kwargs["completions"])


class Counted(Threshold):
    independent = True

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Apart(Threshold):
    independent = True


def alone(completions, **kwargs):
    return [0.0] * len(completions)


class Says(Threshold):
    @property
    def independent(self):
        return False


alone.independent = True


@functools.wraps(alone)
def wrapped(completions, **kwargs):
    return [float(len(completions))] * len(completions)


counted = Counted(1).__call__
named = Named()
number = 3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    (folder / "my_scoring_rewards.py").write_text(MODULE)
    return folder


def load(folder: Path, **entry: Any) -> Reward:
    section = RewardsSection(reward_funcs=[RewardFunction(**entry)])
    return load_rewards(section, folder=folder, device="cpu")[0]


INDEPENDENT: list[dict[str, Any]] = [
    {"path": "my_scoring_rewards.alone"},
    {"path": "my_scoring_rewards.Apart", "parameters": {"at": 1}},
    {"path": "rewards.accuracy.math"},
    {"model": "a/model"},
]
SEEING_ALL: list[dict[str, Any]] = [
    {"path": "my_scoring_rewards.anything"},
    # One call for each prompt may leave something for the next.
    {"path": "my_scoring_rewards.anything", "per_prompt": True},
    {"path": "my_scoring_rewards.Counted"},
    {"path": "my_scoring_rewards.counted"},
    {"path": "my_scoring_rewards.Says"},
    # A decorator copies what the function inside says.
    {"path": "my_scoring_rewards.wrapped"},
    # It is not imported, and may have a state.
    {"path": "my_scoring_rewards.alone", "isolated": True},
]


def test_rewards_that_are_independent_say_so_themselves(folder: Path) -> None:
    """One that does not is enough."""
    for entry in (*INDEPENDENT, *SEEING_ALL):
        section = RewardsSection(reward_funcs=[RewardFunction(**entry)])
        assert are_independent(section, folder=folder) == (entry in INDEPENDENT), entry
    every = [RewardFunction(**entry) for entry in INDEPENDENT]
    assert are_independent(RewardsSection(reward_funcs=every), folder=folder)
    with_another = [*every, RewardFunction(**SEEING_ALL[0])]
    assert not are_independent(RewardsSection(reward_funcs=with_another), folder=folder)


def rewards(reward: Reward, *texts: str, **columns: Any) -> list[float]:
    scores = RewardScorer([reward]).score([group(0, "p", texts, **columns)], STATE)
    column: list[float] = scores.groups[0].rewards[:, 0].tolist()
    return column


def test_parameters_are_bound_to_a_function(folder: Path) -> None:
    reward = load(folder, path="rewards.length.close_to_characters", parameters={"target": 2, "scale": 4})
    assert reward.name == "close_to_characters"
    assert rewards(reward, "aa", "abcd", target=7) == [0.0, -0.5]


def test_a_shipped_reward_finds_its_column(folder: Path) -> None:
    reward = load(folder, path="rewards.accuracy.math")
    assert rewards(reward, r"\boxed{\frac{2}{4}}", r"\boxed{3}", ground_truth="0.5") == [1.0, 0.0]


def test_a_class_beside_the_recipe_is_constructed(folder: Path) -> None:
    reward = load(folder, path="my_scoring_rewards.Threshold", name="long", parameters={"at": 3})
    assert reward.name == "long"
    assert rewards(reward, "aa", "aaa") == [0.0, 1.0]


def test_a_callable_object_goes_by_its_own_name(folder: Path) -> None:
    assert load(folder, path="my_scoring_rewards.named").name == "its_own_name"


def test_a_function_that_declares_nothing_takes_any_parameter(folder: Path) -> None:
    assert rewards(load(folder, path="my_scoring_rewards.anything", parameters={"at": 2}), "a") == [2.0]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"path": "rewards.length.close_to_characters", "parameters": {"traget": 5}},
            "reward 'close_to_characters' has no parameter 'traget'; it has: target, scale\n  hint: did you mean `target`?",
        ),
        (
            {"path": "my_scoring_rewards.Threshold", "parameters": {"att": 5}},
            "reward 'Threshold' has no parameter 'att'; it has: at\n  hint: did you mean `at`?",
        ),
        (
            {"path": "my_scoring_rewards.NotCallable", "parameters": {"x": 5}},
            "reward 'NotCallable' has no parameter 'x'; it has: none",
        ),
        (
            {"path": "rewards.length.close_to_characters", "parameters": {"completions": 5}},
            "reward 'close_to_characters': parameter 'completions' is given by the trainer, not by the recipe",
        ),
        (
            {"path": "my_scoring_rewards.Threshold", "parameters": {"at": -1}},
            "reward 'Threshold': Threshold(...) raised ValueError: at is -1",
        ),
        (
            {"path": "my_scoring_rewards.Threshold"},
            (
                "reward 'Threshold': Threshold(...) raised TypeError: Threshold.__init__() missing 1 required positional argument: "
                "'at'"
            ),
        ),
        (
            {"path": "my_scoring_rewards.NotCallable"},
            "reward 'NotCallable': objects of class NotCallable cannot be called; give it `__call__`",
        ),
        (
            {"path": "my_scoring_rewards.number"},
            "reward 'number' is of type int; allowed is a function, a class or a callable object",
        ),
        (
            {"path": "rewards.length.num_tokens", "model": "some/model"},
            "rewards.reward_funcs: a reward has either `path` or `model`",
        ),
        ({}, "rewards.reward_funcs: a reward has either `path` or `model`"),
    ],
)
def test_what_cannot_be_a_reward_is_refused(folder: Path, entry: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError) as caught:
        load(folder, **entry)
    assert str(caught.value) == message


def test_a_reward_model_stands_beside_functions(folder: Path) -> None:
    tokenizer = build_tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
    )
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / "models" / "judge")
    tokenizer.save_pretrained(folder / "models" / "judge")
    section = RewardsSection(
        reward_funcs=[RewardFunction(model="models/judge"), RewardFunction(path="rewards.diversity.unique_characters")]
    )
    scorer = RewardScorer(load_rewards(section, folder=folder, device="cpu"))
    assert scorer.names == ("judge", "unique_characters")
    scored = scorer.score([group(0, "p", ["ab", "aa"], conversational=True)], STATE).groups[0]
    assert scored.rewards[:, 1].tolist() == [2.0, 1.0]
    assert torch.isfinite(scored.rewards[:, 0]).all()
    assert scorer.state_dict() == {}
