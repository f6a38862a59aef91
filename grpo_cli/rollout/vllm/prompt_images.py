"""Prompts with images as vLLM takes them: it reads one placeholder for each image, and puts as many tokens there as the image takes.

What is sent to a server are the images themselves, encoded as the dataset has them. Nothing that a request says is opened as a path or an
address.
"""

import base64
import binascii
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeGuard

from PIL import Image

from grpo_cli.errors import TrainingError
from grpo_cli.types import Prompt
from grpo_cli.vision.pictures import decoded, pixels_of


@dataclass(frozen=True, kw_only=True, slots=True)
class ImagePrompt:
    """A prompt with images, on its way to vLLM.

    Attributes:
        uid: Names it in errors.
        ids: Its tokens, as the model is trained on them.
        unexpanded: Its tokens with one placeholder for each image.
        images: Encoded (PNG, JPEG ...), in the order of the placeholders.
    """

    uid: str
    ids: tuple[int, ...]
    unexpanded: tuple[int, ...]
    images: tuple[bytes, ...]

    @classmethod
    def of(cls, prompt: Prompt, tokenizer: Any) -> Self:
        """Prepare a prompt of the run.

        Args:
            prompt: Its text is what the chat template wrote, with one placeholder for each image.
            tokenizer: The model's.
        """
        unexpanded = tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
        return cls(uid=prompt.uid, ids=prompt.ids, unexpanded=tuple(unexpanded), images=prompt.images)

    @classmethod
    def from_request(cls, asked: Mapping[str, Any]) -> Self:
        """Read the JSON of `request`, in which images are in base64.

        Raises:
            TrainingError: If it is something else.
        """
        uid, ids, unexpanded, images = (asked.get(name) for name in ("uid", "prompt", "unexpanded", "images"))
        if not isinstance(uid, str) or not _are_tokens(ids) or not _are_tokens(unexpanded):
            raise TrainingError(
                "a prompt with images has `uid`, a text, and `prompt` and `unexpanded`, lists of token ids"
            )
        if not isinstance(images, list) or not images:
            raise TrainingError("images: allowed: a list of image files, each in base64")
        return cls(uid=uid, ids=tuple(ids), unexpanded=tuple(unexpanded), images=tuple(map(_decoded_base64, images)))

    def request(self) -> dict[str, Any]:
        """Say it as a request does, with the images as they are."""
        return {"uid": self.uid, "prompt": self.ids, "unexpanded": self.unexpanded, "images": self.images}

    def check_number(self, most: int) -> None:
        """Refuse more images than vLLM was told to take.

        Args:
            most: Images of one prompt.

        Raises:
            TrainingError: If there are more.
        """
        if not most:
            raise TrainingError(f"prompt {self.uid}: it has images, and vLLM runs a model that reads text only")
        if len(self.images) > most:
            raise TrainingError(
                f"prompt {self.uid}: it has {len(self.images)} images; vLLM takes {most} of a prompt here",
                hint=more_images_hint(len(self.images)),
            )

    def opened(self) -> dict[str, Any]:
        """Give what vLLM's renderer takes.

        Raises:
            ValueError: If an image cannot be read, or all of them have more pixels than Pillow lets one image have: a body that is not long
                can hold hundreds of large ones.
        """
        most = Image.MAX_IMAGE_PIXELS
        if most is not None and sum(map(pixels_of, self.images)) > most:
            raise ValueError(f"they have more than {most:,} pixels")
        images = [decoded(content) for content in self.images]
        return {"prompt_token_ids": list(self.unexpanded), "multi_modal_data": {"image": images}}

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Name the prompt in whatever goes wrong with its images: vLLM's renderer calls the model's processor, which raises anything."""
        try:
            yield
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise TrainingError(f"prompt {self.uid}: vLLM does not take its images: {reason}") from error

    def checked(self, answer: Any) -> Any:
        """Give what vLLM's renderer made of the prompt.

        Raises:
            TrainingError: If those are other tokens than the model is trained on.
        """
        found = tuple(answer["prompt_token_ids"])
        if found != self.ids:
            others = ", and others" if len(found) == len(self.ids) else ""
            raise TrainingError(
                f"prompt {self.uid}: with its images vLLM makes {len(found)} tokens of it, and the model's processor {len(self.ids)}{others}",
                hint="they prepare images differently: leave out model.processor_kwargs, use another vLLM, or leave out vllm.mode",
            )
        return answer


def more_images_hint(number: int) -> str:
    """Say how to let vLLM take a number of images with a prompt."""
    return (
        f'start the server with `--engine "limit_mm_per_prompt={{image: {number}}}"`; where this run starts vLLM, it is '
        f"`vllm.engine: {{limit_mm_per_prompt: {{image: {number}}}}}`"
    )


def images_per_prompt(engine: Any) -> int:
    """Ask how many images vLLM takes with one prompt; 0: it serves a model that reads text only.

    Args:
        engine: vLLM's, or its client of one.
    """
    sight = engine.vllm_config.model_config.multimodal_config
    return 0 if sight is None else int(sight.get_limit_per_prompt("image"))


def rendered(prompt: Prompt, *, tokenizer: Any, engine: Any) -> Any:
    """Give a prompt in the form that vLLM's engine in this process takes.

    Args:
        prompt: With images or without.
        tokenizer: The model's.
        engine: vLLM's `LLMEngine`.

    Raises:
        TrainingError: If vLLM does not take the images or so many, or makes other tokens of the prompt than the model is trained on.
    """
    if not prompt.images:
        return {"type": "token", "prompt_token_ids": list(prompt.ids)}
    asked = ImagePrompt.of(prompt, tokenizer)
    asked.check_number(images_per_prompt(engine))
    with asked.explained():
        (answer,) = engine.renderer.render_cmpl([asked.opened()])
    return asked.checked(answer)


def _are_tokens(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(token) is int for token in value)


def _decoded_base64(image: Any) -> bytes:
    try:
        return base64.b64decode(image, validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise TrainingError("images: allowed: a list of image files, each in base64") from None
