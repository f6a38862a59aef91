"""Images on their way to vLLM, without vLLM."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from vision_cases import VisionCase

from grpo_cli.errors import TrainingError
from grpo_cli.rollout.vllm.prompt_images import rendered


class Raising:
    """A renderer that raises what a processor may raise."""

    def render_cmpl(self, prompts: list[object]) -> object:
        raise KeyError(f"pixel_values of {len(prompts)}\nprompt")

    @property
    def renderer(self) -> "Raising":
        """Of vLLM's engine."""
        return self


@pytest.mark.parametrize(
    ("image", "reason"), [(b"no image", "an image cannot be read: cannot identify"), (None, "'pixel_values of 1")]
)
def test_whatever_fails_is_told_in_one_line(
    image: bytes | None, reason: str, vision_folder: Callable[[str], Path]
) -> None:
    it = VisionCase(vision_folder("qwen2_5_vl"))
    prompt = it.prompts[1] if image is None else replace(it.prompts[1], images=(image,))
    with pytest.raises(TrainingError, match=f"vLLM does not take its images: {reason}") as raised:
        rendered(prompt, tokenizer=it.processor.tokenizer, engine=Raising())
    assert "\n" not in raised.value.message
