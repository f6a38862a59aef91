"""When a completion has ended."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

from grpo_cli.types import Sampling

_BROKEN_CHARACTER_TOKENS = 4
"""A window of byte tokens may begin inside a character, which takes up to four bytes."""


class StopCheck:
    """Tells whether the newest token of a completion ends it.

    Stop strings are looked for in the decoded text, special tokens left out, so they are found however they fall into tokens. Only
    the last tokens are decoded: as many as the longest stop string has bytes, for a token that shows has at least one.

    Args:
        tokenizer: Decodes tokens.
        sampling: Stop tokens, stop strings, and the length below which neither counts.
    """

    def __init__(self, tokenizer: Any, sampling: Sampling) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = frozenset(sampling.stop_ids)
        self._strings = sampling.stop_strings
        self._min_tokens = sampling.min_tokens
        self._window = max((len(text.encode()) for text in self._strings), default=0) + _BROKEN_CHARACTER_TOKENS
        added = tokenizer.added_tokens_decoder.items() if self._strings else ()
        self._hidden = frozenset(token for token, properties in added if properties.special)

    def ended(self, completions: Sequence[Sequence[int]]) -> list[bool]:
        """Check completions that have just grown by one token.

        Args:
            completions: Their tokens; none had ended before.

        Returns:
            One answer per completion.
        """
        ended = [ids[-1] in self._stop_ids for ids in completions]
        if not self._strings:
            return ended
        open_ones = [
            number for number, ids in enumerate(completions) if not ended[number] and len(ids) >= self._min_tokens
        ]
        tails = [self._tail(completions[number]) for number in open_ones]
        texts = self._tokenizer.batch_decode(tails, skip_special_tokens=True) if tails else []
        for number, tail, text in zip(open_ones, tails, texts, strict=True):
            ended[number] = any(string in text and self._is_new(string, tail, text) for string in self._strings)
        return ended

    def _tail(self, ids: Sequence[int]) -> list[int]:
        """Give the last tokens that show in the text."""
        visible = (token for token in reversed(ids) if token not in self._hidden)
        return list(islice(visible, self._window))[::-1]

    def _is_new(self, string: str, tail: list[int], text: str) -> bool:
        """Tell whether a string found in a tail was completed by its last token, not in the time before `min_tokens`."""
        before: str = self._tokenizer.decode(tail[:-1], skip_special_tokens=True)
        # An unfinished character shows as a replacement character, which is not yet text.
        return text.rfind(string) + len(string) > len(before.rstrip("\ufffd"))
