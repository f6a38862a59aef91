"""How the images of segments reach the model, together with the tokens of a layout.

In a packed row an image is encoded once for all completions of its prompt; in padded rows it comes with each of them, as the model
itself expects it.

Letters: N rows, T tokens of a row, A kinds of rotary positions (1, or 3 for time, height and width).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from grpo_cli.policy.layout import Layout
from grpo_cli.types import Segment
from grpo_cli.vision.inputs import image_features, joined, plain_arguments, prompt_positions
from grpo_cli.vision.processor import VisionProcessor, blank_image


@dataclass(frozen=True, kw_only=True)
class SegmentImages:
    """The images of the segments that go through the model together.

    Attributes:
        model: A transformers vision-language model.
        segments: Some of them with images.
        vision: Makes tensors of them.
    """

    model: Any
    segments: Sequence[Segment]
    vision: VisionProcessor

    def padded(self, layout: Layout) -> dict[str, Any]:
        """Give what the model is called with beside padded rows."""
        per_row = [
            tensors
            for tensors, segment in zip(self._tensors, self.segments, strict=True)
            for _ in segment.completion_ids
        ]
        tensors = joined([tensors for tensors in per_row if tensors])
        features = image_features(self.model, tensors)
        # Where its positions depend on the images' sizes, the model is told them.
        told = plain_arguments(self.model, layout.ids, tensors)
        return {name: one for name, one in told.items() if not name.startswith("pixel")} | {
            "mm_encoder_outputs": features
        }

    def packed(self) -> dict[str, Any]:
        """Give what the model is called with beside a packed row of prompts and completions, which is `placed`."""
        return {"mm_encoder_outputs": image_features(self.model, joined([one for one in self._tensors if one]))}

    def placed(self, layout: Layout, *, continues: bool = False) -> Layout:
        """Give a packed row the rotary positions that its images ask for, [1, T] or [A, 1, T].

        Args:
            layout: The row, before it moves to the model's device: reading places back from there would wait for it.
            continues: Whether the row is of one segment, whose prompt was fed before.
        """
        fed = [layout.ids.numel()] if continues else [_fed(segment) for segment in self.segments]
        places = torch.split(layout.positions[0], fed)
        tables = [_table(self.model, *pair) for pair in zip(self.segments, self._tensors, strict=True)]
        rows = torch.cat([table[:, own] for table, own in zip(tables, places, strict=True)], dim=1)
        return replace(layout, positions=rows if len(rows) == 1 else rows[:, None])

    @cached_property
    def _tensors(self) -> list[Mapping[str, Tensor]]:
        """Those of each segment; empty for one without images."""
        return [self.vision.tensors(segment.images) if segment.images else {} for segment in self.segments]


def nothing_seen(model: Any, vision: VisionProcessor) -> Tensor:
    """Encode an image that does not matter, because all processes go through the weights together: a 0 [] that depends on them."""
    features = image_features(model, vision.tensors((blank_image(),)))["image"]
    encoded = [features.pooler_output, getattr(features, "deepstack_features", ())]
    return sum((0.0 * tensor.float().sum() for tensor in _flat(encoded)), torch.zeros((), device=model.device))


def _flat(nested: Any) -> Iterator[Tensor]:
    if isinstance(nested, Tensor):
        yield nested
        return
    for one in nested or ():
        yield from _flat(one)


def _fed(segment: Segment) -> int:
    """Count a segment's tokens in a packed row."""
    return len(segment.prompt_ids) + sum(len(ids) - 1 for ids in segment.completion_ids)


def _table(model: Any, segment: Segment, tensors: Mapping[str, Tensor]) -> Tensor:
    """Give the rotary position of each place in the longest sequence of a segment: int64 [A, places]."""
    prompt = prompt_positions(model, segment.prompt_ids, tensors)
    longest = max(len(ids) for ids in segment.completion_ids)
    behind = torch.arange(longest) + prompt.max() + 1
    return torch.cat([prompt, behind.expand(len(prompt), -1)], dim=1)
