"""Parts of models: what is frozen, and what learns at a rate of its own."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tiny_vision_models import VISION_FAMILIES
from transformers import AutoProcessor
from vision_prompts import PICTURES

from grpo_cli.engine.optimizer import build_optimizer
from grpo_cli.errors import ModelError
from grpo_cli.policy.adapters import save_adapters
from grpo_cli.policy.load import load_model
from grpo_cli.policy.parts import parameters_of
from grpo_cli.recipe.schema import LoraSection, ModelSection, TrainSection

PARTS = ("vision_tower", "projector", "language_model")


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_three_parts_are_the_whole_model_and_overlap_nowhere(
    family: str, *, vision_folder: Callable[[str], Path]
) -> None:
    model = _model(vision_folder(family))
    parts = [set(parameters_of(model, part)) for part in PARTS]
    assert all(parts)
    assert sorted(name for part in parts for name in part) == sorted(name for name, _ in model.named_parameters())
    assert not parts[2] & {name for name, _ in model.named_parameters() if "vis" in name}
    decoder = {id(parameter) for parameter in model.get_decoder().parameters()}
    assert decoder <= {id(model.get_parameter(name)) for name in parts[2]}


def test_frozen_parts_are_not_trained(vision_folder: Callable[[str], Path]) -> None:
    model = _model(vision_folder("qwen2_5_vl"), freeze=["vision_tower", "projector", "lm_head"])
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name in parameters_of(model, "language_model") if not name.startswith("lm_head")}


def test_frozen_parts_get_no_adapters(vision_folder: Callable[[str], Path]) -> None:
    model = _model(vision_folder("smolvlm"), freeze=["vision_tower"], lora=LoraSection(r=2))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if "lora" in name}
    assert any("connector" in name for name in trained)
    assert not any("vision_model" in name for name in trained)


@pytest.mark.parametrize(
    ("freeze", "lora", "expected"),
    [
        (
            ["vision_tower"],
            LoraSection(target_modules=["k_proj"]),
            "target_modules: .*vision_model.*k_proj is in a part",
        ),
        (
            ["lm_head"],
            LoraSection(modules_to_save=["lm_head"]),
            "modules_to_save: lm_head is in a part that stays as it",
        ),
        (
            ["vision_tower", "projector", "text_model.layers"],
            LoraSection(),
            "model.freeze: it leaves no linear layer",
        ),
    ],
)
def test_what_stays_as_it_is_cannot_be_adapted(
    freeze: list[str], lora: LoraSection, expected: str, *, vision_folder: Callable[[str], Path]
) -> None:
    with pytest.raises(ModelError, match=expected):
        _model(vision_folder("smolvlm"), freeze=freeze, lora=lora)


def test_adapters_beside_frozen_parts_are_saved_and_loaded(tiny_model_folder: Path, tmp_path: Path) -> None:
    lora = LoraSection(r=2, modules_to_save=["norm"])
    section = ModelSection(name_or_path=str(tiny_model_folder), freeze=["layers.1.mlp", "model.layers.0"], lora=lora)
    model = load_model(section, folder=tmp_path)
    trained = [name for name, one in model.named_parameters() if one.requires_grad]
    assert len(trained) == 2 * 4 + 1, "two matrices for each projection of the second layer's attention, and the norm"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(parameter.requires_grad)
    save_adapters(model, tmp_path / "saved")
    again = load_model(section, folder=tmp_path, adapters=tmp_path / "saved")
    for (name, one), (_, other) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("vision_towr", "vision_towr; allowed: vision_tower, projector, language_model, the name of a module"),
        ("model.visual.block", "did you mean `model.visual.blocks`?"),
    ],
)
def test_an_unknown_part_is_named(part: str, expected: str, *, vision_folder: Callable[[str], Path]) -> None:
    with pytest.raises(ModelError) as caught:
        _model(vision_folder("qwen2_5_vl"), freeze=[part])
    assert expected in f"{caught.value.message} {caught.value.hint}"


def test_a_text_model_has_no_vision_tower(tiny_model_folder: Path) -> None:
    with pytest.raises(ModelError, match="has no part called vision_tower; allowed: the name of a module"):
        _model(tiny_model_folder, freeze=["vision_tower"])


def test_something_is_left_to_train(vision_folder: Callable[[str], Path]) -> None:
    with pytest.raises(ModelError, match="nothing is left to train"):
        _model(vision_folder("gemma3"), freeze=[*PARTS])


def test_each_part_learns_at_its_own_rate(vision_folder: Callable[[str], Path]) -> None:
    model = _model(vision_folder("qwen3_vl"), freeze=["lm_head"])
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    section = TrainSection(learning_rate=1e-3, learning_rates={"vision_tower": 1e-4, "projector": 0.0})
    optimizer = build_optimizer(model, section, device=torch.device("cpu"))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    # The first step of Adam moves every weight by its learning rate.
    rates = {"language_model": 1e-3, "vision_tower": 1e-4, "projector": 0.0}
    for part, rate in rates.items():
        for name, parameter in parameters_of(model, part).items():
            moved = 0.0 if name.startswith("lm_head") else rate
            torch.testing.assert_close(
                before[name] - parameter.detach(), torch.full_like(parameter, moved), rtol=1e-2, atol=1e-7
            )


def test_no_weight_has_two_rates(vision_folder: Callable[[str], Path]) -> None:
    section = TrainSection(learning_rates={"vision_tower": 1e-4, "model.visual": 1e-5})
    with pytest.raises(ModelError, match=r"model\.visual has weights that another part there has"):
        build_optimizer(_model(vision_folder("qwen2_vl")), section, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("section", "freeze"),
    [(TrainSection(learning_rates={"vision_tower": 1e-4}), ["vision_tower"])]
    + [(TrainSection(learning_rates={part: 1e-4}), []) for part in ("projector", "lm_head")],
)
def test_a_rate_for_what_is_not_trained_is_refused(
    section: TrainSection, freeze: list[str], *, vision_folder: Callable[[str], Path]
) -> None:
    (part,) = section.learning_rates
    lora = None if freeze else LoraSection(r=2, target_modules=["q_proj"])
    model = _model(vision_folder("smolvlm"), freeze=freeze, lora=lora)
    with pytest.raises(ModelError, match=f"{part} has a rate of its own, but none of its weights is trained"):
        build_optimizer(model, section, device=torch.device("cpu"))


def test_a_name_that_several_modules_end_with_is_refused(vision_folder: Callable[[str], Path]) -> None:
    with pytest.raises(ModelError, match=r"model\.freeze: mlp may mean 5 modules") as caught:
        _model(vision_folder("qwen2_vl"), freeze=["mlp"])
    blocks = "model.visual.blocks.0.mlp, model.visual.blocks.1.mlp, model.visual.merger.mlp"
    assert caught.value.hint == f"name each that is meant: {blocks}, model.language_model.layers.0.mlp, ..."
    one = _model(vision_folder("qwen2_vl"), freeze=["layers.0.mlp"])
    frozen = {name for name, parameter in one.named_parameters() if not parameter.requires_grad}
    assert frozen
    assert all(name.startswith("model.language_model.layers.0.mlp.") for name in frozen)


def test_gemma3s_projector_is_trained_whole_beside_adapters_and_saved(
    vision_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Its weight is a parameter of the module itself, where no adapter can be put."""
    folder = vision_folder("gemma3")
    lora = LoraSection(r=2, target_modules=["q_proj"], modules_to_save=["multi_modal_projector"])
    model = _model(folder, lora=lora)
    images = [Image.open(io.BytesIO(PICTURES[0]))]
    inputs = AutoProcessor.from_pretrained(folder)(text=["<start_of_image>?"], images=[images], return_tensors="pt")
    model(**inputs).logits.square().mean().backward()
    projector = [one for one in parameters_of(model, "projector").values() if one.requires_grad]
    assert len(projector) == 2
    for parameter in projector:
        assert parameter.grad is not None
        assert parameter.grad.any()
        parameter.data += 1.0
    save_adapters(model, tmp_path, weights=None)
    loaded = load_model(ModelSection(name_or_path=str(folder), lora=lora), folder=folder, adapters=tmp_path)
    assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)


def _model(folder: Path, **settings: Any) -> Any:
    return load_model(ModelSection(name_or_path=str(folder), **settings), folder=folder)
