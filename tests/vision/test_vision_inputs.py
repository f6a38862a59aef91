"""What a model is given beside the tokens, against what it makes of the pixels by itself.

The models' own call with the processor's whole output is the truth here: none of it passes through the code under test.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import pytest
import torch
from tiny_vision_models import VISION_FAMILIES
from torch import Tensor, nn
from vision_prompts import PICTURES, prepared

from grpo_cli.vision.inputs import (
    image_features,
    image_runs,
    is_vision_language,
    joined,
    placeholder_ids,
    prompt_positions,
    token_types,
)
from grpo_cli.vision.processor import VisionProcessor

M_ROPE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
PLACEHOLDERS = {
    "gemma3": ["<image_soft_token>"],
    "llava_next": ["<image>"],
    "smolvlm": ["<image>"],
    "idefics3": ["<image>"],
    "internvl": ["<IMG_CONTEXT>"],
    **{family: ["<|image_pad|>", "<|video_pad|>"] for family in M_ROPE},
}

Load = Callable[[str], Any]


def flat(features: Any) -> list[Tensor]:
    """All that a tower found, image after image: [features, width], and the same of what goes to deeper layers."""
    found = features["image"]
    layers = [found.pooler_output, *(getattr(found, "deepstack_features", None) or [])]
    joint = [torch.cat(list(layer)) if isinstance(layer, list | tuple) else layer for layer in layers]
    return [layer.reshape(-1, layer.shape[-1]) for layer in joint]


def positions_given(model: Any, inputs: Any) -> Tensor:
    """Call a model with all that its processor made, and give the positions that its language model was called with."""
    seen: list[Tensor] = []

    def note(_module: nn.Module, _arguments: Any, named: Any) -> None:
        seen.append(named["position_ids"])

    hook = model.model.language_model.register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad():
        model(**inputs)
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_what_is_seen_changes_what_is_said(family: str, vision_model: Load, family_processor: Load) -> None:
    inputs = dict(prepared(family_processor(family), PICTURES[:1]))
    with torch.no_grad():
        seen = vision_model(family)(**inputs).logits[0, -1].log_softmax(-1)
        inputs["pixel_values"] = inputs["pixel_values"].flip(-1)
        other = vision_model(family)(**inputs).logits[0, -1].log_softmax(-1)
    entropy = -(seen.exp() * seen).sum()
    assert (seen - other).abs().max() > 0.1
    assert entropy > 1


@pytest.mark.parametrize("family", VISION_FAMILIES)
@pytest.mark.parametrize("split", [[1, 1, 1, 1], [2, 1, 1], [1, 3], [3, 1]])
def test_images_of_several_prompts_are_seen_together_as_one_by_one(
    family: str, split: Sequence[int], vision_model: Load, family_processor: Load
) -> None:
    vision, model = VisionProcessor(family_processor(family)), vision_model(family)
    rest = iter(PICTURES)
    prompts = [tuple(next(rest) for _ in range(number)) for number in split]
    with torch.no_grad():
        together = flat(image_features(model, joined([vision.tensors(images) for images in prompts])))
        alone = [flat(image_features(model, vision.tensors((image,)))) for image in PICTURES]
    for found, expected in zip(together, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(found, torch.cat(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", VISION_FAMILIES)
@pytest.mark.parametrize("number", [1, 3])
def test_encoded_images_and_positions_give_the_logits_of_the_plain_call(
    family: str, number: int, vision_model: Load, family_processor: Load
) -> None:
    vision, model, images = VisionProcessor(family_processor(family)), vision_model(family), PICTURES[:number]
    inputs = prepared(family_processor(family), images)
    ids, types = inputs["input_ids"], token_types(model.config, inputs["input_ids"])
    positions = prompt_positions(model, ids[0].tolist(), vision.tensors(images))
    with torch.no_grad():
        expected = model(**inputs).logits
        found = model(
            input_ids=ids,
            position_ids=positions[:, None] if family in M_ROPE else positions,
            mm_encoder_outputs=image_features(model, vision.tensors(images)),
            **({"token_type_ids": types} if family == "gemma3" else {}),
        ).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", M_ROPE)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_positions_are_those_that_the_model_computes(
    family: str, number: int, vision_model: Load, family_processor: Load
) -> None:
    vision, model, images = VisionProcessor(family_processor(family)), vision_model(family), PICTURES[:number]
    inputs = prepared(family_processor(family), images)
    found = prompt_positions(model, inputs["input_ids"][0].tolist(), vision.tensors(images))
    assert torch.equal(found[:, None], positions_given(model, inputs)[-3:])


@pytest.mark.parametrize("family", M_ROPE)
def test_the_positions_of_an_image_are_by_time_height_and_width(
    family: str, vision_model: Load, family_processor: Load
) -> None:
    """The first picture is 24 by 16 pixels, and a token stands for 8 by 8 of them: rows 0 0 0 1 1 1, columns 0 1 2 0 1 2."""
    vision, model = VisionProcessor(family_processor(family)), vision_model(family)
    ids = vision.encode("a<|vision_start|><|image_pad|><|vision_end|>bc", PICTURES[:1])
    positions = prompt_positions(model, ids, vision.tensors(PICTURES[:1]))
    before, behind = [0, 1], [5, 6, 7]  # three columns: the largest place of the image is 2 + 2
    assert positions.tolist() == [
        [*before, 2, 2, 2, 2, 2, 2, *behind],
        [*before, 2, 2, 2, 3, 3, 3, *behind],
        [*before, 2, 3, 4, 2, 3, 4, *behind],
    ]


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_placeholders_types_and_runs_are_those_of_the_image_tokens(
    family: str, vision_model: Load, family_processor: Load
) -> None:
    processor, config = family_processor(family), vision_model(family).config
    inputs = prepared(processor, PICTURES[:3])
    ids = inputs["input_ids"][0].tolist()
    names = PLACEHOLDERS[family]
    assert placeholder_ids(config) == tuple(sorted(processor.tokenizer.convert_tokens_to_ids(names)))

    image_token = processor.tokenizer.convert_tokens_to_ids(names[0])
    expected, place = [], 0
    for token, run in groupby(ids):
        length = len(list(run))
        if token == image_token:
            expected.append((place, length))
        place += length
    assert len(expected) >= 3
    assert image_runs(config, ids) == tuple(expected)

    types = token_types(config, inputs["input_ids"])
    assert types[0].tolist() == [int(token == image_token) for token in ids]
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in inputs:
            assert torch.equal(types, inputs[name])


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_a_prompt_without_images_has_no_runs_and_plain_positions(family: str, vision_model: Load) -> None:
    model = vision_model(family)
    assert is_vision_language(model.config)
    assert image_runs(model.config, [65, 66, 67]) == ()
    assert (prompt_positions(model, [65, 66, 67], {}) == torch.arange(3)).all()


def test_a_text_model_is_no_vision_language_model(tiny_model_folder: Any) -> None:
    from transformers import AutoConfig

    assert not is_vision_language(AutoConfig.from_pretrained(tiny_model_folder))
