"""The prompts of a run: rows loaded, looked at, and put in order."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset

from grpo_cli.data.preflight import preflight, preflight_stream
from grpo_cli.data.prompts import PromptBuilder
from grpo_cli.data.sampler import PromptSampler, PromptSource
from grpo_cli.data.sources import image_places, load_rows
from grpo_cli.data.streaming import StreamingPromptSampler
from grpo_cli.engine.vision import VisionLoader
from grpo_cli.recipe.schema import DatasetSection
from grpo_cli.types import Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedPrompts:
    """Where prompts come from, and what is known about them.

    Attributes:
        source: Gives them, in order.
        first: One of them.
        probe: One with images, if there are some: what is tried before training is tried on it.
        longest: Tokens of the longest one; what `max_prompt_length` allows if not all are prepared yet; None: not known.
        most_images: Images of a prompt that has most, of those that are known.
        lines: What to tell a person about the dataset.
    """

    source: PromptSource
    first: Prompt
    probe: Prompt
    longest: int | None
    most_images: int
    lines: Sequence[str]

    @property
    def longest_known(self) -> int:
        """Tokens of the longest prompt, or of the one that is tried first where not all are prepared yet."""
        return len(self.probe.ids) if self.longest is None else self.longest


def load_prompts(
    section: DatasetSection, tokenizer: Any, *, vision: VisionLoader, folder: Path, seed: int
) -> LoadedPrompts:
    """Load the training prompts.

    Args:
        section: The recipe's `dataset:`.
        tokenizer: The policy's.
        vision: Loads what prepares images, if there are some.
        folder: The recipe's folder.
        seed: The run's.

    Raises:
        DataError: If the dataset cannot be read or gives no prompts, or has images that the model does not read.
        ModelError: If what prepares images does not load.
    """
    rows = load_rows(section, folder=folder)
    builder = PromptBuilder(tokenizer, section, vision=vision.of(rows), places=image_places(section, folder=folder))
    source: PromptSource
    if isinstance(rows, Dataset):
        found = preflight(rows, builder)
        source = PromptSampler(rows, builder, found, seed=seed, shuffle=section.shuffle)
    else:
        found = preflight_stream(rows, builder)
        source = StreamingPromptSampler(
            rows, builder, seed=seed, shuffle=section.shuffle, buffer_size=section.shuffle_buffer_size
        )
    return LoadedPrompts(
        source=source,
        first=found.first,
        probe=found.first_with_images or found.first,
        longest=found.lengths.maximum if found.complete and not found.unmeasured else section.max_prompt_length,
        most_images=0 if found.images is None else found.images.most,
        lines=[*vision.overlooked(rows, section), *found.lines()],
    )
