"""The reward of vlm_tiny.yaml."""

from collections.abc import Sequence
from typing import Any

from rewards.text import Completion, text_of

_DIGIT_AND_END = 2
"""Tokens of an answer that ends where it should; special tokens leave no trace in its text."""


def digit(
    completions: Sequence[Completion], completion_ids: Sequence[Sequence[int]], solution: Sequence[str], **_: Any
) -> list[float]:
    """Judge the name of a digit: 1 if it is right and the answer ends with it, 0.5 if it is right and more follows, else 0."""
    return [
        float(text.startswith(right)) * (1.0 if text == right and len(ids) == _DIGIT_AND_END else 0.5)
        for text, ids, right in zip(map(text_of, completions), completion_ids, solution, strict=True)
    ]
