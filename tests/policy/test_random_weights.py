"""Models that start from random weights: `model.random_weights_seed`."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from grpo_cli.policy.load import load_model
from grpo_cli.policy.locate import with_weights_in
from grpo_cli.recipe.schema import ModelSection


def state(model: Any) -> dict[str, torch.Tensor]:
    """All weights of a model, by name."""
    return dict(model.state_dict())


def assert_same_weights(first: Any, second: Any) -> None:
    one, other = state(first), state(second)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def without_weights(folder: Path, target: Path) -> Path:
    """Copy a model folder but for its weights."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors"))
    return target


@pytest.mark.parametrize("kind", ["text", "qwen2_5_vl"])
def test_they_are_those_of_the_architecture_and_the_seed(
    kind: str, tiny_model_folder: Path, vision_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = without_weights(tiny_model_folder if kind == "text" else vision_folder(kind), tmp_path / "model")
    maker = AutoModelForCausalLM if kind == "text" else AutoModelForImageTextToText
    with torch.random.fork_rng():
        torch.manual_seed(3)
        expected = maker.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)

    before = torch.get_rng_state()
    model = load_model(ModelSection(name_or_path="model", random_weights_seed=3), folder=tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert type(model) is type(expected)
    assert model.training
    assert_same_weights(model, expected)
    other = load_model(ModelSection(name_or_path="model", random_weights_seed=4), folder=tmp_path)
    assert not torch.equal(model.get_input_embeddings().weight, other.get_input_embeddings().weight)


def test_weights_that_are_there_are_not_read(tiny_model_folder: Path, tmp_path: Path) -> None:
    section = ModelSection(name_or_path=str(tiny_model_folder), random_weights_seed=1, dtype="bfloat16")
    model = load_model(section, folder=tmp_path)
    assert model.dtype == torch.bfloat16
    trained = load_model(with_weights_in(section, tiny_model_folder), folder=tmp_path)
    assert_same_weights(trained, AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.bfloat16))
    assert not torch.equal(model.get_input_embeddings().weight, trained.get_input_embeddings().weight)


def test_a_model_on_meta_has_none(tiny_model_folder: Path, tmp_path: Path) -> None:
    section = ModelSection(name_or_path=str(tiny_model_folder), random_weights_seed=0)
    assert {
        parameter.device.type for parameter in load_model(section, folder=tmp_path, device="meta").parameters()
    } == {"meta"}
