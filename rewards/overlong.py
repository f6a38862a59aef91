"""A soft punishment for completions that come near the length limit."""

from collections.abc import Sequence
from typing import Any

from rewards.independence import independent


@independent
def soft_overlong_punishment(
    completion_ids: Sequence[Sequence[int]], *, max_completion_length: int, soft_punish_cache: int, **_: Any
) -> list[float]:
    """Punish the last stretch before the length limit, linearly from 0 to -1.

    With |y| tokens, L = max_completion_length and C = soft_punish_cache:

        0                    if |y| <= L - C
        (L - C - |y|) / C    if L - C < |y| <= L
        -1                   if |y| > L

    With C = 0 there is no stretch: 0 up to L, -1 above.

    Source: DAPO (Yu et al. 2025, arXiv 2503.14476), equation 13.

    Raises:
        ValueError: If the stretch does not fit into the limit.
    """
    if not 0 <= soft_punish_cache <= max_completion_length:
        raise ValueError(
            f"soft_punish_cache is {soft_punish_cache}; allowed is 0 to max_completion_length ({max_completion_length})"
        )
    unpunished = max_completion_length - soft_punish_cache
    return [_punishment(len(ids), unpunished, soft_punish_cache) for ids in completion_ids]


def _punishment(length: int, unpunished: int, cache: int) -> float:
    excess = length - unpunished
    if excess <= 0:
        return 0.0
    return -1.0 if excess > cache else -excess / cache
