"""Adapters are merged into the model that they were trained on, and into no other."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import build_tiny_model

from grpo_cli.errors import ModelError
from grpo_cli.policy.adapters import save_adapters
from grpo_cli.policy.load import load_model
from grpo_cli.policy.merge import merged_model
from grpo_cli.policy.quantization import write_quantization
from grpo_cli.policy.weights_below import BASE_FILE, base_file
from grpo_cli.recipe.schema import LoraSection, ModelSection

Adapters = Callable[[], Path]


@pytest.fixture
def below(tmp_path: Path) -> Path:
    return build_tiny_model(tmp_path / "below", hidden_size=64)


@pytest.fixture
def adapters(below: Path, tmp_path: Path) -> Path:
    """As a run writes them."""
    section = ModelSection(name_or_path=str(below), lora=LoraSection(r=2, modules_to_save=["norm"]))
    folder = tmp_path / "adapters"
    save_adapters(load_model(section, folder=tmp_path), folder)
    for name, content in base_file(section, tmp_path).items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("quantized", [False, True])
def test_other_weights_are_refused_and_the_same_ones_taken_from_anywhere(
    quantized: bool, below: Path, adapters: Path, tmp_path: Path
) -> None:
    """Also where they have as many layers of the same sizes, or more, so that everything would fit."""
    if quantized:
        section = ModelSection(name_or_path=str(below), lora=LoraSection(), quantization="4bit")
        write_quantization(replace(section, lora=None), adapters)
    others = {"seed": 1}, {"num_layers": 3}, {"num_layers": 1}, {"hidden_size": 32}
    for number, settings in enumerate(others):
        other = build_tiny_model(tmp_path / str(number), **{"hidden_size": 64, **settings})  # type: ignore[arg-type]
        with pytest.raises(
            ModelError, match=rf"^--base: {other} has other weights than {below}, which the adapters in"
        ):
            merged_model(adapters, base=str(other))
    expected = merged_model(adapters).state_dict()
    below.rename(tmp_path / "moved")
    found = merged_model(adapters, base=str(tmp_path / "moved")).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    build_tiny_model(below, hidden_size=64, seed=2)
    with pytest.raises(ModelError, match=rf"^--merge: {below} has other weights than when the adapters in"):
        merged_model(adapters)


def test_where_nothing_tells_another_name_is_told_as_training_tells_it(
    below: Path, adapters: Path, tmp_path: Path
) -> None:
    (adapters / BASE_FILE).unlink()
    told: list[str] = []
    merged_model(adapters, say=told.append)
    assert told == []
    shutil.copytree(below, tmp_path / "moved")
    merged_model(adapters, base=str(tmp_path / "moved"), say=told.append)
    assert told == [f"{adapters}: they were trained on {below}; --base is {tmp_path / 'moved'}"]


def test_a_model_of_another_width_is_told_by_its_layer(adapters: Path, tmp_path: Path) -> None:
    (adapters / BASE_FILE).unlink()
    wide = build_tiny_model(tmp_path / "wide", hidden_size=32)
    with pytest.raises(ModelError) as caught:
        merged_model(adapters, base=str(wide))
    assert caught.value.message.startswith(
        f"--base: {wide} is another model than the adapters in {adapters} were trained on: model.layers.0.mlp.down_proj has 64 inputs"
    )


def test_a_model_that_is_not_there_is_asked_for_as_the_command_does(below: Path, adapters: Path) -> None:
    below.rename(below.with_name("moved"))
    with pytest.raises(ModelError) as caught:
        merged_model(adapters)
    assert caught.value.message == f"the model that the adapters in {adapters} were trained on: {below} does not exist"
    assert caught.value.hint == "if it is somewhere else now, name it: --base MODEL"
    with pytest.raises(ModelError) as caught:
        merged_model(adapters, base="./gone")
    assert caught.value.message == "--base: ./gone does not exist"
    assert caught.value.hint == f"paths are taken from {Path.cwd()}", "and each place is named once"
