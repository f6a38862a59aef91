"""Images on their way to vLLM, without vLLM."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from vision_cases import VisionCase

from grpo_cli.errors import TrainingError
from grpo_cli.rollout.vllm.prompt_images import rendered


class Raising:
    """An engine that takes one image of a prompt, and whose renderer raises what a processor may raise."""

    def __init__(self) -> None:
        sight = SimpleNamespace(get_limit_per_prompt=lambda kind: {"image": 1}[kind])
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(multimodal_config=sight))

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


def test_more_images_than_vllm_takes_are_told_with_what_lets_it_take_them(
    vision_folder: Callable[[str], Path],
) -> None:
    it = VisionCase(vision_folder("qwen2_5_vl"))
    with pytest.raises(TrainingError, match=r"prompt 0:2: it has 2 images; vLLM takes 1 of a prompt here") as raised:
        rendered(it.prompts[2], tokenizer=it.processor.tokenizer, engine=Raising())
    assert '--engine "limit_mm_per_prompt={image: 2}"' in (raised.value.hint or "")
    assert "`vllm.engine: {limit_mm_per_prompt: {image: 2}}`" in (raised.value.hint or "")
