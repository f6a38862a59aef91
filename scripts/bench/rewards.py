"""The reward of the benchmark; nothing is imported, so that both processes can name it."""

from collections.abc import Sequence


def letter_share(completions: Sequence[str], **columns: object) -> list[float]:
    """Score completions by their share of the letter e."""
    del columns
    return [text.count("e") / (1 + len(text)) for text in completions]
