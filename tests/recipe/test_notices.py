"""What is allowed, probably not meant, and therefore said."""

from pathlib import Path

import pytest
import torch

from grpo_cli.recipe.load import load_recipe

pytestmark = pytest.mark.usefixtures("recipe_folder")


def notices(*overrides: str) -> tuple[str, ...]:
    return load_recipe(Path("good.yaml"), overrides).notices


def test_a_usual_recipe_has_none() -> None:
    assert notices() == ()


def test_bfloat16_weights_with_a_small_learning_rate_are_noticed() -> None:
    (notice,) = notices("model.dtype=bfloat16", "train.learning_rate=1e-6")
    assert notice == (
        "model.dtype: found bfloat16 with learning rate 1e-06; bfloat16 weights above about 0.00051 in size will not move, because a "
        "step of the optimizer is less than their rounding (use float32 with `train.bf16: true`)"
    )
    (notice,) = notices("model.dtype=auto", "train.learning_rate=9e-6")
    assert notice.startswith(
        "model.dtype: found auto with learning rate 9e-06; weights of a checkpoint in bfloat16 above"
    )


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.dtype=bfloat16", "train.learning_rate=1e-5"),
        ("model.dtype=float32", "train.learning_rate=1e-6", "train.bf16=true"),
        ("model.dtype=bfloat16", "train.learning_rate=0"),
    ],
)
def test_other_precisions_and_rates_are_not(overrides: tuple[str, ...]) -> None:
    assert notices(*overrides) == ()


def test_the_size_above_which_weights_stand_still_is_true_of_bfloat16() -> None:
    weights = torch.arange(1, 2**15, dtype=torch.int16).view(torch.bfloat16)
    weights = weights[(weights > 0) & (weights < 1)]
    rate = 1e-6
    moves = (weights - rate) != weights
    assert not moves[weights > 512 * rate].any()
    assert moves[weights < 256 * rate].all()


def test_evaluation_on_the_rows_of_training_is_noticed() -> None:
    same = ("eval.dataset.name=prompts.jsonl",)
    (notice,) = notices(*same)
    assert notice == (
        "eval.dataset: found prompts.jsonl (train), which is trained on as well, so that evaluation cannot tell learning from "
        "memorising (use another split or file)"
    )
    assert notices(*same, "eval.dataset.split=train[:2]", "dataset.split=train[:4]") == ()
