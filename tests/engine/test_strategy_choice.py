"""Which strategy `auto` takes, and what a user's settings of DeepSpeed become."""

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_cli.engine.distributed import Processes
from grpo_cli.engine.strategies import choice
from grpo_cli.engine.strategies.choice import SHARE_OF_MEMORY, automatic_strategy, copy_bytes, deepspeed_settings
from grpo_cli.errors import RecipeError
from grpo_cli.policy.load import load_shapes
from grpo_cli.recipe.schema import DistributedSection, GrpoSection, LoraSection, ModelSection, Recipe, TrainSection


class TwoProcesses(Processes):
    """As one of two, of which nothing is asked but what they have."""

    def __init__(self) -> None:
        super().__init__(bf16=False)
        self.count = 2

    @property
    def sharing_memory(self) -> int:
        return 2


def recipe_of(folder: Path, *, lora: LoraSection | None = None, beta: float = 0.0, **distributed: Any) -> Recipe:
    return Recipe(
        model=ModelSection(name_or_path=str(folder), dtype="float32", lora=lora),
        grpo=GrpoSection(beta=beta),
        distributed=DistributedSection(**distributed),
    )


def weight_bytes(folder: Path) -> int:
    return (folder / "model.safetensors").stat().st_size - int.from_bytes(
        (folder / "model.safetensors").read_bytes()[:8], "little"
    ) - 8  # fmt: skip


@pytest.mark.parametrize(("beta", "copies"), [(0.0, 4), (0.1, 5)])
def test_a_copy_of_everything_is_taken_as_long_as_it_fits(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, beta: float, copies: int
) -> None:
    """Weights, gradients and two moments, and the reference's weights; two processes share the memory."""
    needed = copies * weight_bytes(tiny_model_folder)
    least = 2 * needed / SHARE_OF_MEMORY
    for memory, expected in ((int(least * 1.01), "ddp"), (int(least * 0.99), "deepspeed_zero3")):
        monkeypatch.setattr(choice, "total_memory", lambda _device, memory=memory: memory)
        name, reason = automatic_strategy(recipe_of(tiny_model_folder, beta=beta), tiny_model_folder, TwoProcesses())
        assert name == expected
        assert "a copy of everything takes" in reason


def test_adapters_need_little_more_than_the_weights(tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = int(2 * 1.01 * weight_bytes(tiny_model_folder) / SHARE_OF_MEMORY)
    monkeypatch.setattr(choice, "total_memory", lambda _device: memory)
    recipe = recipe_of(tiny_model_folder, lora=LoraSection(r=2), beta=0.1)
    assert automatic_strategy(recipe, tiny_model_folder, TwoProcesses())[0] == "ddp"


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_copies_that_are_trained_whole_are_counted(beta: float, tiny_model_folder: Path) -> None:
    """Each has a gradient and two moments; the kept reference is one more. What is frozen has neither."""
    model = load_shapes(ModelSection(name_or_path=str(tiny_model_folder)), folder=tiny_model_folder)
    weights, embedding = (sum(one.nbytes for one in part.parameters()) for part in (model, model.model.embed_tokens))
    ends = ["embed_tokens", "lm_head"]  # one matrix in this model
    new, old = LoraSection(modules_to_save=ends), LoraSection(modules_to_save=ends, adapter_name_or_path="begun")
    assert copy_bytes(recipe_of(tiny_model_folder, lora=new, beta=beta), model) == weights + 4 * embedding
    kept = 5 if beta else 4
    assert copy_bytes(recipe_of(tiny_model_folder, lora=old, beta=beta), model) == weights + kept * embedding
    frozen = recipe_of(tiny_model_folder, beta=beta)
    frozen.model.freeze = ["embed_tokens"]
    assert copy_bytes(frozen, model) == (2 if beta else 1) * weights + 3 * (weights - embedding)


def test_one_process_has_everything(tiny_model_folder: Path) -> None:
    assert automatic_strategy(recipe_of(tiny_model_folder), tiny_model_folder, Processes(bf16=False))[0] == "ddp"


def test_own_settings_are_kept_and_what_is_auto_is_left_to_the_recipe(tiny_model_folder: Path, tmp_path: Path) -> None:
    own = {
        "train_batch_size": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage3_prefetch_bucket_size": 7, "reduce_bucket_size": "auto"},
        "comms_logger": {"enabled": True},
    }
    (tmp_path / "own.json").write_text(json.dumps(own))
    recipe = recipe_of(tiny_model_folder, strategy="deepspeed_zero3", deepspeed_config="own.json", offload_params=True)
    settings = deepspeed_settings(recipe, 3, tmp_path)
    zero = settings["zero_optimization"]
    assert (zero["stage"], zero["stage3_prefetch_bucket_size"], zero["offload_param"]["device"]) == (3, 7, "cpu")
    assert isinstance(zero["reduce_bucket_size"], int)
    assert settings["comms_logger"] == {"enabled": True}
    assert settings["bf16"] == {"enabled": False}
    assert "train_batch_size" not in settings


@pytest.mark.parametrize(
    ("dtype", "bf16", "rounds"), [("float32", True, True), ("bfloat16", False, True), ("float32", False, False)]
)
def test_weights_are_rounded_where_the_recipe_computes_in_bfloat16(
    tiny_model_folder: Path, dtype: Any, bf16: bool, rounds: bool
) -> None:
    recipe = Recipe(model=ModelSection(name_or_path=str(tiny_model_folder), dtype=dtype), train=TrainSection(bf16=bf16))
    assert deepspeed_settings(recipe, 3, tiny_model_folder)["bf16"] == {"enabled": rounds}


@pytest.mark.parametrize("key", ["train_batch_size", "gradient_clipping", "optimizer", "scheduler", "bf16", "fp16"])
def test_what_the_recipe_says_is_refused(tiny_model_folder: Path, tmp_path: Path, key: str) -> None:
    (tmp_path / "own.json").write_text(json.dumps({key: 1}))
    recipe = recipe_of(tiny_model_folder, strategy="deepspeed_zero2", deepspeed_config="own.json")
    with pytest.raises(RecipeError, match=f"sets {key}, which the recipe decides"):
        deepspeed_settings(recipe, 2, tmp_path)


def test_a_file_that_is_not_there_is_named(tiny_model_folder: Path, tmp_path: Path) -> None:
    recipe = recipe_of(tiny_model_folder, strategy="deepspeed_zero2", deepspeed_config="missing.json")
    with pytest.raises(RecipeError, match=r"missing\.json: distributed\.deepspeed_config: cannot be read"):
        deepspeed_settings(recipe, 2, tmp_path)
