"""Rewards on how varied a completion is."""

from collections.abc import Sequence
from typing import Any

from rewards.independence import independent
from rewards.text import Completion, text_of


@independent
def unique_characters(completions: Sequence[Completion], **_: Any) -> list[float]:
    """Reward the number of different characters: `|set(text)|`.

    Source: the toy reward of TRL's GRPO documentation.
    """
    return [float(len(set(text_of(completion)))) for completion in completions]
