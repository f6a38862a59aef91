"""A vision-language model's processor: text with placeholders and images become tokens, and tensors for the model."""

import io
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from cachetools import LRUCache
from PIL import Image
from torch import Tensor

from grpo_cli.vision.pictures import decoded

CACHED_BYTES = 512 << 20
"""Of image tensors that are kept, because training and sampling ask for those of the same prompts more than once."""

_OF_TOKENS = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})
"""What a processor says about tokens; all of it follows from their ids."""


class VisionProcessor:
    """Prepares prompts with images as the model was trained to see them.

    Args:
        processor: A transformers processor, with a tokenizer and a chat template.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._tensors: LRUCache[tuple[bytes, ...], Mapping[str, Tensor]] = LRUCache(CACHED_BYTES, getsizeof=_size)

    @property
    def chat_template(self) -> str | None:
        """What `render` applies; None: there is none, and the recipe brings none."""
        template: str | None = self._processor.chat_template
        return template

    @property
    def settings(self) -> Mapping[str, Any]:
        """Everything that decides what becomes of an image, such as the sizes that it is brought to."""
        found: Mapping[str, Any] = self._processor.to_dict()
        return found

    def count_image_tokens(self, ids: Sequence[int]) -> int:
        """Count the tokens of a prompt that belong to images."""
        of_images = frozenset(self._processor.image_token_ids)
        return sum(token in of_images for token in ids)

    def render(self, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> str:
        """Apply the chat template to turns whose content is a list of `{type: text, text: ...}` and `{type: image}` parts.

        Args:
            messages: The turns.
            **arguments: For the template.
        """
        text: str = self._processor.apply_chat_template(list(messages), tokenize=False, **arguments)
        return text

    def encode(self, text: str, images: tuple[bytes, ...]) -> tuple[int, ...]:
        """Tokenize a rendered prompt, with as many tokens in the place of each image as the model has features of it.

        Args:
            text: As `render` gives it, one placeholder for each image.
            images: Encoded (PNG, JPEG ...), in the order of the placeholders; at least one.

        Raises:
            DamagedImageError: If an image cannot be read.
            ValueError: If the text has another number of placeholders.
        """
        places = text.count(self._processor.image_token)  # not every family's processor counts
        if places != len(images):
            raise ValueError(f"{len(images)} image(s) for {places} placeholder(s) {self._processor.image_token}")
        found = self._call(text, images)
        self._keep(images, found)
        return tuple(found["input_ids"][0].tolist())

    def tensors(self, images: tuple[bytes, ...]) -> Mapping[str, Tensor]:
        """Give what the model is fed for the images of one prompt, such as `pixel_values`, on the CPU.

        Args:
            images: Encoded; at least one.

        Raises:
            DamagedImageError: If an image cannot be read.
        """
        kept = self._tensors.get(images)
        if kept is not None:
            return kept
        return self._keep(images, self._call(self._processor.image_token * len(images), images))

    def _call(self, text: str, images: tuple[bytes, ...]) -> Mapping[str, Tensor]:
        found: Mapping[str, Tensor] = self._processor(
            text=[text],
            images=[[decoded(image) for image in images]],
            return_tensors="pt",
            add_special_tokens=False,  # the chat template writes them
        )
        return found

    def _keep(self, images: tuple[bytes, ...], found: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        tensors = {name: tensor for name, tensor in found.items() if name not in _OF_TOKENS}
        if _size(tensors) <= CACHED_BYTES:
            self._tensors[images] = tensors
        return tensors


@cache
def blank_image() -> bytes:
    """Give a small grey picture, as PNG."""
    target = io.BytesIO()
    Image.new("RGB", (56, 56), "grey").save(target, format="PNG")
    return target.getvalue()


def _size(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
