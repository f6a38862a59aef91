"""What is named as a model must be one with whole weights: quantized checkpoints and adapters are refused before anything is loaded."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_models import build_tiny_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from grpo_cli.errors import ModelError
from grpo_cli.policy.adapters import save_adapters
from grpo_cli.policy.load import load_model, load_shapes
from grpo_cli.policy.load_vision import load_vision
from grpo_cli.policy.merge import merged_model
from grpo_cli.recipe.schema import LoraSection, ModelSection

REFUSED = r"model\.name_or_path: .* has quantized weights \({}\); allowed: a model with whole weights"


@pytest.mark.parametrize("lora", [None, LoraSection(r=2)])
def test_a_folder_that_was_saved_in_8_bits_is_refused(lora: LoraSection | None, tmp_path: Path) -> None:
    """Read as if they were floats its weights are up to 127, and everything goes on without a word."""
    whole, folder = build_tiny_model(tmp_path / "whole", hidden_size=64), tmp_path / "rounded"
    settings = BitsAndBytesConfig(load_in_8bit=True)
    AutoModelForCausalLM.from_pretrained(whole, quantization_config=settings, device_map="cpu").save_pretrained(folder)
    for section in (
        ModelSection(name_or_path=str(folder), lora=lora),
        ModelSection(name_or_path=str(folder), lora=lora, quantization="4bit"),
    ):
        with pytest.raises(ModelError, match=REFUSED.format("bitsandbytes")) as caught:
            load_model(section, folder=tmp_path)
        assert "model.quantization" in str(caught.value.hint)
        with pytest.raises(ModelError, match=REFUSED.format("bitsandbytes")):
            load_shapes(section, folder=tmp_path)


@pytest.mark.parametrize("settings", [{"quant_method": "fp8"}, {"quant_method": "gptq", "bits": 4}, {"bits": 4}])
def test_so_are_all_other_kinds(settings: dict[str, Any], tiny_model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "rounded"
    shutil.copytree(tiny_model_folder, folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": settings}))
    kind = settings.get("quant_method", "of an unknown kind")
    with pytest.raises(ModelError, match=REFUSED.format(kind)):
        load_model(ModelSection(name_or_path=str(folder)), folder=tmp_path)


def test_adapters_are_refused_wherever_a_configuration_is_looked_for(tiny_model_folder: Path, tmp_path: Path) -> None:
    section = ModelSection(name_or_path=str(tiny_model_folder), lora=LoraSection(r=2))
    save_adapters(load_model(section, folder=tmp_path), tmp_path / "adapters")
    named = ModelSection(name_or_path=str(tmp_path / "adapters"))
    for load in (load_model, load_shapes, load_vision):
        with pytest.raises(ModelError, match=r"holds adapters \(model\.lora\), and is no whole model"):
            load(named, folder=tmp_path)


def test_adapters_are_merged_only_into_a_model_that_all_of_them_fit(tmp_path: Path) -> None:
    deep, flat = (build_tiny_model(tmp_path / str(layers), num_layers=layers) for layers in (3, 2))
    section = ModelSection(name_or_path=str(deep), lora=LoraSection(r=2, modules_to_save=["embed_tokens"]))
    save_adapters(load_model(section, folder=tmp_path), tmp_path / "adapters")
    assert merged_model(tmp_path / "adapters").config.num_hidden_layers == 3
    with pytest.raises(ModelError, match=r"holds adapters of another model than .*: .*layers\.2\..* does not fit"):
        merged_model(tmp_path / "adapters", base=str(flat))
