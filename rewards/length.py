"""Rewards on how long a completion is."""

from collections.abc import Sequence
from typing import Any

from rewards.independence import independent
from rewards.text import Completion, text_of


@independent
def num_characters(completions: Sequence[Completion], *, scale: float = 1.0, **_: Any) -> list[float]:
    """Reward long completions: `characters / scale`; a negative scale rewards short ones.

    Source: the first example of TRL's guide to custom reward functions.
    """
    return [len(text_of(completion)) / scale for completion in completions]


@independent
def num_tokens(completion_ids: Sequence[Sequence[int]], *, scale: float = 1.0, **_: Any) -> list[float]:
    """Reward long completions: `tokens / scale`, the stop token included; a negative scale rewards short ones.

    Source: TRL's guide to custom reward functions.
    """
    return [len(ids) / scale for ids in completion_ids]


@independent
def close_to_characters(
    completions: Sequence[Completion], *, target: float = 20, scale: float = 1.0, **_: Any
) -> list[float]:
    """Reward a length in characters: `-|target - characters| / scale`, so 0 is best.

    Source: the quick start of TRL's GRPO documentation (target 20, scale 1).
    """
    return [-abs(target - len(text_of(completion))) / scale for completion in completions]


@independent
def close_to_tokens(
    completion_ids: Sequence[Sequence[int]], *, target: float = 20, scale: float = 1.0, **_: Any
) -> list[float]:
    """Reward a length in tokens: `-|target - tokens| / scale`, so 0 is best; the stop token counts.

    Source: `close_to_characters`, on tokens.
    """
    return [-abs(target - len(ids)) / scale for ids in completion_ids]
