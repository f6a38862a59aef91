"""What a prompt with images becomes, against what the family's processor makes of the whole conversation by itself."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from PIL import Image
from tiny_vision_models import VISION_FAMILIES
from vision_prompts import PICTURES, conversation, png, prepared

from grpo_cli.vision.processor import VisionProcessor

NOT_FOR_THE_TOWER = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}


@pytest.mark.parametrize("family", VISION_FAMILIES)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_prompt_becomes_what_the_processor_makes_of_the_conversation(
    family: str, number: int, family_processor: Callable[[str], Any]
) -> None:
    images = PICTURES[:number]
    expected = prepared(family_processor(family), images)
    vision = VisionProcessor(family_processor(family))
    text = vision.render(conversation([{}] * number), add_generation_prompt=True)

    assert vision.encode(text, images) == tuple(expected["input_ids"][0].tolist())
    kept, anew = vision.tensors(images), VisionProcessor(family_processor(family)).tensors(images)
    assert kept.keys() == anew.keys() == expected.keys() - NOT_FOR_THE_TOWER
    for name, tensor in kept.items():
        assert torch.equal(tensor, expected[name])
        assert torch.equal(anew[name], tensor)


@pytest.mark.parametrize("family", VISION_FAMILIES)
@pytest.mark.parametrize(("placeholders", "number"), [(1, 2), (2, 1), (0, 1)])
def test_an_image_without_a_place_and_a_place_without_an_image_are_refused(
    family: str,
    placeholders: int,
    number: int,
    family_processor: Callable[[str], Any],
) -> None:
    vision = VisionProcessor(family_processor(family))
    with pytest.raises(ValueError, match=rf"{number} image\(s\) for {placeholders} placeholder\(s\) <"):
        vision.encode(vision.render(conversation([{}] * placeholders)), PICTURES[:number])


@pytest.mark.parametrize("broken", [b"", b"no image", "cut"])
def test_what_is_no_image_is_told(broken: bytes | str, family_processor: Callable[[str], Any]) -> None:
    vision = VisionProcessor(family_processor("gemma3"))
    image = PICTURES[0][: len(PICTURES[0]) // 2] if isinstance(broken, str) else broken
    with pytest.raises(ValueError, match=r"an image cannot be read: "):
        vision.tensors((PICTURES[1], image))


def test_a_greyscale_and_a_transparent_image_are_read_as_colours(family_processor: Callable[[str], Any]) -> None:
    vision = VisionProcessor(family_processor("qwen2_vl"))
    grey, clear = Image.new("L", (16, 16), 128), Image.new("RGBA", (16, 16), (128, 128, 128, 255))
    first, second = (vision.tensors((png(image),))["pixel_values"] for image in (grey, clear))
    assert torch.equal(first, second)
