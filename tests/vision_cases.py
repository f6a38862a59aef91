"""A family's tiny model with prompts, some with images, and what transformers makes of its processor's own output.

None of what the truth is computed from passes through the code under test: ids, pixels and kinds of tokens come from the processor.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor
from vision_prompts import PICTURES, conversation, prepared

from grpo_cli.types import Completion, Group, Prompt, PromptId, Sampling
from grpo_cli.vision.inputs import placeholder_ids
from grpo_cli.vision.processor import VisionProcessor

IMAGES = ((), PICTURES[:1], PICTURES[1:3], PICTURES[3:])
"""Of each prompt: none, one, two, one."""

WIDE = 512
"""A sliding window that all sequences fit into, so that Gemma 3 can be fed by groups."""

OF_TOKENS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


class VisionCase:
    """A family's model, its processor, and prompts with what the processor itself makes of them."""

    def __init__(self, folder: Path) -> None:
        config = AutoConfig.from_pretrained(folder)
        if getattr(config.text_config, "sliding_window", None):
            config.text_config.sliding_window = WIDE
        self.model: Any = AutoModelForImageTextToText.from_pretrained(folder, config=config).eval()
        self.processor: Any = AutoProcessor.from_pretrained(folder)
        self.vision = VisionProcessor(self.processor)
        self.inputs = [prepared(self.processor, images) for images in IMAGES]
        self.prompts = [
            Prompt(
                uid=PromptId(f"0:{number}"),
                ids=tuple(inputs["input_ids"][0].tolist()),
                text=self.vision.render(conversation([{} for _ in images]), add_generation_prompt=True),
                messages=None,
                row={},
                images=tuple(images),
            )
            for number, (inputs, images) in enumerate(zip(self.inputs, IMAGES, strict=True))
        ]
        self.banned = placeholder_ids(config)

    def sampling(self, **changes: Any) -> Sampling:
        end = self.processor.tokenizer.eos_token_id
        return Sampling(**{"stop_ids": (end,), "max_tokens": 10, "banned_ids": self.banned, **changes})

    def plain_logps(self, number: int, completion: Completion) -> Tensor:
        """Log-probabilities [L] by one call with the pixels and the whole sequence."""
        inputs, length = dict(self.inputs[number]), len(completion.ids)
        inputs["input_ids"] = torch.cat([inputs["input_ids"], torch.tensor([completion.ids])], dim=1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        for name in OF_TOKENS[2:]:
            if name in inputs:
                inputs[name] = torch.cat([inputs[name], torch.zeros(1, length, dtype=torch.long)], dim=1)
        with torch.no_grad():
            logits = self.model(**inputs).logits[0, -length - 1 : -1].float()
        logits[:, list(self.banned)] = -torch.inf
        found: Tensor = logits.log_softmax(dim=-1).gather(1, torch.tensor(completion.ids)[:, None])[:, 0]
        return found

    def move_tower(self, groups: Sequence[Group]) -> None:
        """Change what the model sees, and with it the log-probabilities of a group for each prompt with images, and of those alone."""
        before = [self.plain_logps(number, group.completions[0]) for number, group in enumerate(groups)]
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "vis" in name:
                    parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)), alpha=0.05)
        after = [self.plain_logps(number, group.completions[0]) for number, group in enumerate(groups)]
        assert torch.equal(before[0], after[0])
        assert all((old - new).abs().max() > 0.01 for old, new in zip(before[1:], after[1:], strict=True))
