"""Rewards on the form of a completion: 1 if it has the form, else 0."""

import re
from collections.abc import Sequence
from typing import Any

from rewards.independence import independent
from rewards.text import Completion, text_of

_TAG = r"</?(?:think|answer)>"
_INSIDE = rf"(?:(?!{_TAG}).)*"
_THINK_ANSWER = re.compile(rf"\s*<think>{_INSIDE}</think>\s*<answer>{_INSIDE}</answer>\s*", re.DOTALL)


@independent
def think_answer(completions: Sequence[Completion], **_: Any) -> list[float]:
    """Reward `<think>...</think><answer>...</answer>` and nothing else; whitespace between the parts is free.

    1 if the whole completion has this form with each of the four tags exactly once, else 0.

    Source: the format reward of DeepSeek-R1 (Guo et al. 2025, arXiv 2501.12948, section 2.2.2), whose template (table 1) asks
    for both blocks.
    """
    return [float(_THINK_ANSWER.fullmatch(text_of(completion)) is not None) for completion in completions]


@independent
def think(completions: Sequence[Completion], **_: Any) -> list[float]:
    """Reward reasoning inside `<think>...</think>`, followed by free text.

    1 if the completion starts with `<think>`, closes it, and never opens it again, else 0.

    Source: the semantics of TRL's `think_format_reward`.
    """
    return [float(_starts_with_thought(text_of(completion))) for completion in completions]


def _starts_with_thought(text: str) -> bool:
    return text.startswith("<think>") and text.count("<think>") == 1 and "</think>" in text
