"""Correctness, scaled by length."""

import math
from collections.abc import Sequence
from typing import Any, Literal

from rewards.accuracy import boxed
from rewards.accuracy import math as maths
from rewards.independence import independent
from rewards.text import Completion


@independent
def cosine_scaled(
    completions: Sequence[Completion],
    completion_ids: Sequence[Sequence[int]],
    ground_truth: Sequence[Any] | None = None,
    solution: Sequence[Any] | None = None,
    *,
    max_completion_length: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
    exceed_value: float | None = None,
    correctness: Literal["math", "boxed"] = "math",
    **_: Any,
) -> list[float | None]:
    """Reward short correct answers most, and punish short wrong ones most.

    With t tokens, T = max_completion_length, and the values r_0 at length 0 and r_T at length T:

        r_T + (r_0 - r_T) / 2 * (1 + cos(pi * min(t, T) / T))

    A correct answer goes from max_value_correct (short) to min_value_correct (long); a wrong one from min_value_wrong (short)
    to max_value_wrong (long), so that thinking longer pays when the answer is not found yet. None where correctness is None.

    Source: Demystifying Long Chain-of-Thought Reasoning (Yeo et al. 2025, arXiv 2502.03373), section 4.2 and appendix C.1.

    Args:
        completions: Strings, or lists of messages.
        completion_ids: Their tokens.
        ground_truth: Column with the answers.
        solution: Column with worked solutions; `math` prefers it to `ground_truth`.
        max_completion_length: T, in tokens.
        min_value_wrong: Reward of the shortest wrong answer.
        max_value_wrong: Reward of the longest wrong answer.
        min_value_correct: Reward of the longest correct answer.
        max_value_correct: Reward of the shortest correct answer.
        exceed_value: Reward of any completion of T tokens or more (the paper's exceed penalty); None scores it like others.
        correctness: `math` (`rewards.accuracy.math`) or `boxed` (`rewards.accuracy.boxed`, which needs `ground_truth`).

    Raises:
        ValueError: If `max_completion_length` is below 1, `correctness` unknown, or the column it needs missing.
    """
    if max_completion_length < 1:
        raise ValueError(f"max_completion_length is {max_completion_length}; allowed is at least 1")
    bounds = {True: (max_value_correct, min_value_correct), False: (min_value_wrong, max_value_wrong)}
    rewards: list[float | None] = []
    for verdict, ids in zip(_verdicts(correctness, completions, ground_truth, solution), completion_ids, strict=True):
        if verdict is None:
            rewards.append(None)
        elif exceed_value is not None and len(ids) >= max_completion_length:
            rewards.append(exceed_value)
        else:
            short, long = bounds[verdict == 1.0]
            progress = min(len(ids) / max_completion_length, 1.0)
            rewards.append(long + (short - long) / 2 * (1 + math.cos(math.pi * progress)))
    return rewards


def _verdicts(
    correctness: str,
    completions: Sequence[Completion],
    ground_truth: Sequence[Any] | None,
    solution: Sequence[Any] | None,
) -> list[float | None]:
    """Judge the completions: 1, 0, or None where there is nothing to judge by."""
    if correctness == "math":
        return maths(completions, ground_truth, solution)
    if correctness != "boxed":
        raise ValueError(f"correctness is {correctness!r}; allowed is 'math' or 'boxed'")
    if ground_truth is None:
        raise ValueError("correctness: boxed needs a dataset column `ground_truth`")
    return boxed(completions, ground_truth)
