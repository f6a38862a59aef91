"""Sheets of completions for the tests of evaluation."""

from collections.abc import Sequence

import numpy as np

from grpo_cli.evaluation.sheet import Floats, Sheet

NOT_APPLIED = float("nan")


def make_sheet(
    rewards: Sequence[Sequence[Sequence[float]]] | Floats,
    *,
    weights: Sequence[float] | None = None,
    lengths: Floats | None = None,
    answers: tuple[tuple[str | None, ...], ...] | None = None,
) -> Sheet:
    """Make a sheet of rewards [P][G][F]; every other completion is truncated."""
    values = np.array(rewards, dtype=np.float64)
    prompts, completions, functions = values.shape
    return Sheet(
        uids=tuple(f"0:{number}" for number in range(prompts)),
        reward_names=tuple("abcdef"[:functions]),
        reward_weights=tuple(weights or [1.0] * functions),
        rewards=values,
        lengths=np.ones((prompts, completions)) if lengths is None else lengths,
        truncated=np.arange(prompts * completions).reshape(prompts, completions) % 2 == 1,
        answers=answers,
    )
