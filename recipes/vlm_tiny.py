"""The reward of vlm_tiny.yaml."""

from collections.abc import Sequence
from typing import Any

from rewards.text import Completion, text_of


def digit(completions: Sequence[Completion], solution: Sequence[str], **_: Any) -> list[float]:
    """Judge the name of a digit: 1 if it is right and nothing else is said, 0.5 if it is right and more follows, else 0."""
    return [
        float(text.startswith(right)) * (1.0 if text == right else 0.5)
        for text, right in zip(map(text_of, completions), solution, strict=True)
    ]
