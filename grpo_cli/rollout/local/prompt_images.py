"""The images of the prompts that are sampled from: what the model is fed beside tokens.

Images are encoded when their prompts are fed, a few prompts at a time, and what that gives is dropped with the call: a group's rows
read it from the cache.

Letters: P prompt tokens, A kinds of rotary positions (see `prompt_positions`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from grpo_cli.types import Prompt
from grpo_cli.vision.inputs import image_features, image_runs, joined, prompt_positions, sees_images_both_ways
from grpo_cli.vision.processor import VisionProcessor


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptImages:
    """See the module. Prompts are named by their place.

    Attributes:
        model: A transformers vision-language model.
        prompts: Some of them with images.
        vision: Makes tensors of images.
    """

    model: Any
    prompts: Sequence[Prompt]
    vision: VisionProcessor

    def encoded(self, numbers: Sequence[int]) -> dict[str, Any]:
        """Encode the images of some prompts, and give them as the model takes them; nothing if there are none."""
        parts = [self.vision.tensors(self.prompts[number].images) for number in numbers if self.prompts[number].images]
        return {"mm_encoder_outputs": image_features(self.model, joined(parts))} if parts else {}

    def positions(self, number: int) -> Tensor:
        """Give the rotary positions of a prompt's tokens: int64 [A, P]."""
        prompt = self.prompts[number]
        tensors = self.vision.tensors(prompt.images) if prompt.images else {}
        return prompt_positions(self.model, prompt.ids, tensors)

    def both_ways(self, number: int) -> tuple[tuple[int, int], ...]:
        """Give first place and length of each run of a prompt's tokens that see all of each other."""
        if not sees_images_both_ways(self.model):
            return ()
        return image_runs(self.model.config, self.prompts[number].ids)
