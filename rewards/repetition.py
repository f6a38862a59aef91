"""A penalty for completions that repeat themselves."""

from collections.abc import Sequence
from typing import Any

from rewards.independence import independent


@independent
def repetition_penalty(
    completion_ids: Sequence[Sequence[int]], *, ngram_size: int = 3, max_penalty: float = -1.0, **_: Any
) -> list[float]:
    """Penalise repeated n-grams of tokens: `max_penalty * (1 - different n-grams / n-grams)`.

    0 without a repetition, towards `max_penalty` the more the completion repeats itself; 0 where it has no n-gram at all.

    Source: Demystifying Long Chain-of-Thought Reasoning (Yeo et al. 2025, arXiv 2502.03373), appendix C.2, as a share of the
    completion instead of a penalty per token.

    Raises:
        ValueError: If `ngram_size` is below 1 or `max_penalty` above 0.
    """
    if ngram_size < 1:
        raise ValueError(f"ngram_size is {ngram_size}; allowed is at least 1")
    if max_penalty > 0:
        raise ValueError(f"max_penalty is {max_penalty}; allowed is at most 0")
    return [max_penalty * _repeated_share(ids, ngram_size) for ids in completion_ids]


def _repeated_share(ids: Sequence[int], ngram_size: int) -> float:
    ngrams = [tuple(ids[start : start + ngram_size]) for start in range(len(ids) - ngram_size + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
