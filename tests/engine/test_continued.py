"""Going on from adapters: what they decide, what is told about them, and what is refused in a line with its key."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_models import build_tiny_model

from grpo_cli.engine.continued import with_adapter_settings
from grpo_cli.errors import ModelError
from grpo_cli.policy.adapters import save_adapters
from grpo_cli.policy.load import load_model
from grpo_cli.policy.quantization import write_quantization
from grpo_cli.recipe.load import LoadedRecipe
from grpo_cli.recipe.schema import LoraSection, ModelSection, Recipe

KEY = "model.lora.adapter_name_or_path"


@pytest.fixture
def trained(tiny_model_folder: Path, tmp_path: Path) -> Path:
    """Adapters of a projection."""
    lora = LoraSection(r=2, target_modules=["q_proj"])
    save_adapters(
        load_model(ModelSection(name_or_path=str(tiny_model_folder), lora=lora), folder=tmp_path), tmp_path / "begun"
    )
    return tmp_path / "begun"


def going_on(folder: Path, begun: Path, *chosen: str, **model: Any) -> LoadedRecipe:
    section = ModelSection(name_or_path=str(folder), lora=LoraSection(adapter_name_or_path=str(begun)), **model)
    return with_adapter_settings(
        LoadedRecipe(
            recipe=Recipe(model=section),
            path=begun.parent / "recipe.yaml",
            folder=begun.parent,
            notices=(),
            chosen=frozenset(f"model.lora.{key}" for key in chosen),
        )
    )


def write_settings(begun: Path, **changes: Any) -> None:
    path = begun / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_they_say_what_they_are_like(tiny_model_folder: Path, trained: Path) -> None:
    found = going_on(tiny_model_folder, trained)
    assert found.recipe.model.lora is not None
    assert found.recipe.model.lora.r == 2
    assert found.notices == ()


def test_another_model_below_is_told(tiny_model_folder: Path, trained: Path, tmp_path: Path) -> None:
    other = build_tiny_model(tmp_path / "other", seed=1)
    assert going_on(other, trained).notices == (
        f"{KEY}: they were trained on {tiny_model_folder}; model.name_or_path is {other}",
    )
    link = tmp_path / "link"
    link.symlink_to(tiny_model_folder)
    assert going_on(link, trained).notices == ()
    write_settings(trained, revision="abc")
    assert going_on(tiny_model_folder, trained).notices == (
        f"{KEY}: they were trained on revision abc; model.revision is null",
    )


def test_other_rounded_weights_below_are_told(tiny_model_folder: Path, trained: Path) -> None:
    below = ModelSection(name_or_path=str(tiny_model_folder), quantization="4bit", bnb_4bit_quant_type="fp4")
    write_quantization(below, trained)
    assert going_on(tiny_model_folder, trained).notices == (
        f'{KEY}: they were trained with model.quantization: "4bit"; the recipe\'s is null',
    )
    assert going_on(tiny_model_folder, trained, quantization="4bit").notices == (
        f'{KEY}: they were trained with model.bnb_4bit_quant_type: "fp4"; the recipe\'s is "nf4"',
    )
    assert going_on(tiny_model_folder, trained, quantization="4bit", bnb_4bit_quant_type="fp4").notices == ()


def test_fewer_layers_than_the_recipe_names_are_told(tiny_model_folder: Path, trained: Path) -> None:
    told = f"{KEY}: they are on 2 layers, and all-linear would be 14; those are trained that have some"
    assert going_on(tiny_model_folder, trained, "target_modules").notices == (told,)
    kinds = ("mlp", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    frozen = [f"layers.{layer}.{kind}" for layer in range(2) for kind in kinds]
    assert going_on(tiny_model_folder, trained, "target_modules", freeze=frozen).notices == ()


@pytest.mark.parametrize("setting", ["r", "lora_alpha", "target_modules"])
def test_settings_that_are_not_there_are_named(setting: str, tiny_model_folder: Path, trained: Path) -> None:
    write_settings(trained, **{setting: None})
    with pytest.raises(ModelError, match=rf"{KEY}: .*adapter_config.json does not say {setting}; allowed"):
        going_on(tiny_model_folder, trained)


def test_weights_in_a_file_that_can_run_code_are_refused(tiny_model_folder: Path, trained: Path) -> None:
    (trained / "adapter_model.safetensors").rename(trained / "adapter_model.bin")
    with pytest.raises(ModelError, match=rf"{KEY}: found adapter_model.bin in .*; allowed: adapter_model.safetensors"):
        going_on(tiny_model_folder, trained)
    (trained / "adapter_model.bin").unlink()
    with pytest.raises(ModelError, match=rf"{KEY}: found no weights in"):
        going_on(tiny_model_folder, trained)


def test_a_head_without_the_embedding_that_it_is_does_not_fit(tmp_path: Path) -> None:
    """As PEFT writes it unless it is told that both are one."""
    tied, untied = (build_tiny_model(tmp_path / str(one), tied=one) for one in (True, False))
    lora = LoraSection(r=2, modules_to_save=["lm_head"])
    save_adapters(load_model(ModelSection(name_or_path=str(untied), lora=lora), folder=tmp_path), tmp_path / "begun")
    section = ModelSection(name_or_path=str(tied), lora=replace(lora, adapter_name_or_path=str(tmp_path / "begun")))
    with pytest.raises(ModelError, match=rf"{KEY}: .* other layers or sizes .*: model.embed_tokens.weight is missing"):
        load_model(section, folder=tmp_path)
