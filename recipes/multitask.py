"""The rewards of multitask.yaml. Each looks at the column `task` and returns None where the other one applies."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]


def arithmetic(
    completions: Sequence[Messages], task: Sequence[str], ground_truth: Sequence[str], **_: Any
) -> list[float | None]:
    """Reward an answer whose last number is the right one: 1 or 0."""
    return [
        float(_last_number(completion) == truth) if each == "arithmetic" else None
        for completion, each, truth in zip(completions, task, ground_truth, strict=True)
    ]


def word_count(
    completions: Sequence[Messages], task: Sequence[str], ground_truth: Sequence[str], **_: Any
) -> list[float | None]:
    """Reward an answer of the right number of words: 1, less a tenth for each word too many or too few."""
    return [
        1.0 - abs(len(_text(completion).split()) - int(truth)) / 10 if each == "word_count" else None
        for completion, each, truth in zip(completions, task, ground_truth, strict=True)
    ]


def _text(completion: Messages) -> str:
    return str(completion[0]["content"])


def _last_number(completion: Messages) -> str | None:
    numbers = re.findall(r"\d+", _text(completion))
    return numbers[-1] if numbers else None
