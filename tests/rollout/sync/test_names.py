"""Weights as a checkpoint has them: what `save_pretrained` writes is the truth."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, build_tiny_model
from tiny_vision_models import VISION_FAMILIES
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from grpo_cli.errors import ModelError
from grpo_cli.rollout.sync.names import checkpoint_names


class ModelWeights:
    """A model's parameters, as often as one likes, with a count of those that were asked for."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.given = 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            self.given += 1
            yield name, parameter.detach()


def saved(model: Any, folder: Path) -> dict[str, Tensor]:
    model.save_pretrained(folder)
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_same(streamed: dict[str, Tensor], stored: dict[str, Tensor]) -> None:
    assert streamed.keys() == stored.keys()
    for name, tensor in stored.items():
        assert streamed[name].shape == tensor.shape
        assert torch.equal(streamed[name], tensor)


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_values_are_those_of_the_saved_checkpoint(family: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(build_tiny_model(tmp_path / "model", family))
    weights = checkpoint_names(model, ModelWeights(model))
    stored = saved(model, tmp_path / "saved")
    assert_same(dict(weights), stored)
    assert_same(dict(weights), stored)  # again, as a transfer that failed does
    assert len(list(weights)) == len(stored)


def test_a_dense_model_passes_through_untouched(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(build_tiny_model(tmp_path, "qwen2"))
    weights = ModelWeights(model)
    assert checkpoint_names(model, weights) is weights


def test_experts_are_taken_apart_one_tensor_at_a_time(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(build_tiny_model(tmp_path, "qwen3_moe"))
    weights = ModelWeights(model)
    order = [name for name, _ in model.named_parameters()]
    stream = checkpoint_names(model, weights)
    weights.given = 0
    for name, tensor in stream:
        if "experts.0.gate_proj" in name:
            fused = name.replace("experts.0.gate_proj.weight", "experts.gate_up_proj")
            assert weights.given <= order.index(fused) + 2  # one more shows that the tensor's part is over
            half = len(model.get_parameter(fused)[0]) // 2
            assert torch.equal(tensor, model.get_parameter(fused)[0, :half])


def test_weights_after_training_are_streamed_not_those_of_the_start(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(build_tiny_model(tmp_path / "model", "qwen3_moe"))
    weights = checkpoint_names(model, ModelWeights(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert_same(dict(weights), saved(model, tmp_path / "saved"))


def build_hrm_text() -> Any:
    """A family whose checkpoints have queries, keys, values and gates of a layer in one tensor, and the model does not."""
    from transformers import HrmTextConfig

    config = HrmTextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=4, head_dim=8
    )
    return AutoModelForCausalLM.from_config(config)


def test_tensors_of_a_layer_that_a_checkpoint_has_as_one_are_put_together(tmp_path: Path) -> None:
    model = build_hrm_text()
    stored = saved(model, tmp_path)
    assert any("gqkv_proj" in name for name in stored)
    assert_same(dict(checkpoint_names(model, ModelWeights(model))), stored)


def test_tensors_of_several_layers_that_become_one_are_refused(tmp_path: Path) -> None:
    from transformers.core_model_loading import Chunk, WeightConverter

    model = AutoModelForCausalLM.from_pretrained(build_tiny_model(tmp_path, "llama"))
    targets = [f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(2)]
    model._weight_conversions = [
        WeightConverter(
            source_patterns="model.all_down_proj.weight", target_patterns=targets, operations=[Chunk(dim=0)]
        )
    ]
    with pytest.raises(ModelError, match=r"LlamaForCausalLM: .*several layers") as caught:
        checkpoint_names(model, ModelWeights(model))
    assert "vllm.mode" in str(caught.value.hint)


PUBLISHED = ("gemma3", "llava_next")
"""Families whose makers' checkpoints have the vision tower's weights one level deeper than transformers saves them."""


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_names_of_models_that_see_are_those_of_published_checkpoints(
    family: str, vision_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    model = AutoModelForImageTextToText.from_pretrained(vision_folder(family))
    stored = saved(model, tmp_path / "saved")
    if family in PUBLISHED:
        stored = {name.replace("vision_tower.", "vision_tower.vision_model.", 1): one for name, one in stored.items()}
    if family == "llava_next":  # features are those of the layer before the last, and vLLM has no other
        unused = ("vision_tower.vision_model.encoder.layers.1.", "vision_tower.vision_model.post_layernorm.")
        assert sum(name.startswith(unused) for name in stored) == 18
        stored = {name: one for name, one in stored.items() if not name.startswith(unused)}
    assert_same(dict(checkpoint_names(model, ModelWeights(model))), stored)


@pytest.mark.parametrize("family", PUBLISHED)
def test_a_tower_that_came_from_a_published_checkpoint_keeps_its_names(
    family: str, vision_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    model = AutoModelForImageTextToText.from_pretrained(vision_folder(family))
    expected = dict(checkpoint_names(model, ModelWeights(model)))
    stored = saved(model, tmp_path)
    published = {name.replace("vision_tower.", "vision_tower.vision_model.", 1): one for name, one in stored.items()}
    save_file(published, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert_same(dict(checkpoint_names(loaded, ModelWeights(loaded))), expected)
