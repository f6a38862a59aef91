"""What a recipe names of its model is looked up in its configuration alone, before anything large is read."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_models import build_tiny_model

from grpo_cli.engine.named_parts import check_named_parts
from grpo_cli.errors import ModelError
from grpo_cli.policy.adapters import save_adapters
from grpo_cli.policy.load import load_model
from grpo_cli.recipe.schema import LoraSection, ModelSection, Recipe, TrainSection


@pytest.fixture
def shapes(tiny_model_folder: Path, tmp_path: Path) -> Path:
    """A model that has a configuration, and no weights that could be read."""
    (tmp_path / "model").mkdir()
    shutil.copy(tiny_model_folder / "config.json", tmp_path / "model")
    return tmp_path / "model"


def recipe_of(model: Path, rates: dict[str, float] | None = None, **settings: Any) -> Recipe:
    section = ModelSection(name_or_path=str(model), **settings)
    return Recipe(model=section, train=TrainSection(learning_rates=rates or {}))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"freeze": ["lm_hed"]}, r"model\.freeze: .* no part called lm_hed"),
        ({"rates": {"lm_hed": 0.1}}, r"train\.learning_rates: .* no part called lm_hed"),
        (
            {"rates": {"norm": 0.1}, "lora": LoraSection()},
            r"train\.learning_rates: norm .* none of its weights is trained",
        ),
        ({"lora": LoraSection(target_modules=["q_prj"])}, r"model\.lora\.target_modules: .* no layers called q_prj"),
        ({"lora": LoraSection(modules_to_save=["nrm"])}, r"model\.lora\.modules_to_save: .* no modules called nrm"),
    ],
    ids=str,
)
def test_a_name_that_the_model_does_not_have_is_refused(settings: dict[str, Any], expected: str, shapes: Path) -> None:
    with pytest.raises(ModelError, match=expected):
        check_named_parts(recipe_of(shapes, **settings), folder=shapes.parent)


def test_names_that_it_has_are_not(shapes: Path) -> None:
    lora = LoraSection(target_modules=["q_proj", "up_proj"], modules_to_save=["norm"])
    rates = {"layers.1": 0.1, "model.norm": 0.2}
    check_named_parts(recipe_of(shapes, rates, lora=lora, freeze=["layers.0.self_attn.k_proj"]), folder=shapes.parent)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"hidden_size": 64}, r"^model\.name_or_path: .*q_proj has 64 inputs, and had 32\n"),
        ({"num_layers": 1}, r"^model\.name_or_path: .* it has no model\.layers\.1\.self_attn\.q_proj\n"),
    ],
    ids=str,
)
def test_adapters_that_do_not_fit_are_told_before_the_weights_are_read(
    settings: dict[str, int], expected: str, tiny_model_folder: Path, tmp_path: Path
) -> None:
    lora = LoraSection(r=2, target_modules=[f"model.layers.{layer}.self_attn.q_proj" for layer in range(2)])
    save_adapters(load_model(ModelSection(name_or_path=str(tiny_model_folder), lora=lora), folder=tmp_path), tmp_path)
    other = build_tiny_model(tmp_path / "other", **settings)  # type: ignore[arg-type]
    (other / "model.safetensors").unlink()
    check_named_parts(recipe_of(tiny_model_folder, lora=lora), folder=tmp_path, begun=tmp_path)
    with pytest.raises(ModelError, match=expected):
        check_named_parts(recipe_of(other, lora=lora), folder=tmp_path, begun=tmp_path)
    missing = LoraSection(r=2, target_modules=["q_proj", "k_proj"])
    with pytest.raises(ModelError, match=r"adapter_name_or_path: .* other layers or sizes .* is missing"):
        check_named_parts(recipe_of(tiny_model_folder, lora=missing), folder=tmp_path, begun=tmp_path)
