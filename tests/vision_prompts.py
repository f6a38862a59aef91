"""Pictures, and prompts with them, prepared by a family's processor alone: none of it passes through the code under test."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

SIZES = ((24, 16), (10, 30), (32, 8), (17, 17))
"""Width and height of the pictures: of no two the patches are as many and lie the same way."""


def picture(seed: int, width: int, height: int) -> bytes:
    """Draw random colours, as PNG."""
    colours = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return png(Image.fromarray(colours))


def png(image: Image.Image) -> bytes:
    """Encode an image."""
    target = io.BytesIO()
    image.save(target, format="PNG")
    return target.getvalue()


PICTURES = tuple(picture(number, width, height) for number, (width, height) in enumerate(SIZES))


def conversation(images: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A system turn, and a user's with images among words.

    Args:
        images: What each image's part has beside its type: `{}` for a placeholder alone.
    """
    parts: list[dict[str, Any]] = []
    for image in images:
        parts += [{"type": "text", "text": "See  é:"}, {"type": "image", **image}]
    return [
        {"role": "system", "content": [{"type": "text", "text": "Look."}]},
        {"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]},
    ]


def prepared(processor: Any, images: Sequence[bytes]) -> Mapping[str, Tensor]:
    """Let a processor do everything for the conversation: template, images, tokens."""
    opened = [{"image": Image.open(io.BytesIO(image))} for image in images]
    found: Mapping[str, Tensor] = processor.apply_chat_template(
        conversation(opened), add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    return found
