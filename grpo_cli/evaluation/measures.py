"""The metrics of an evaluation, each as a total and a count per prompt: prompts are what an evaluation draws a sample of.

A reward that did not apply is in neither, so that it is left out and not counted as 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from grpo_cli.evaluation.estimators import majority_success, pass_at_k
from grpo_cli.evaluation.sheet import Floats, Sheet


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """A metric before it is averaged.

    Attributes:
        totals: [P], summed over what a prompt adds.
        counts: [P], how much that is: completions, or 1 for the prompt as a whole; 0: the prompt has nothing to say.
    """

    totals: Floats
    counts: Floats

    @property
    def value(self) -> float:
        """The mean; NaN of nothing."""
        count = float(self.counts.sum())
        return float(self.totals.sum()) / count if count else float("nan")

    def select(self, prompts: Sequence[int]) -> Self:
        """Give the same of some of the prompts, by their numbers and in that order."""
        chosen = list(prompts)
        return type(self)(totals=self.totals[chosen], counts=self.counts[chosen])


@dataclass(frozen=True, kw_only=True, slots=True)
class Success:
    """Which completions are correct.

    Attributes:
        values: [P, G], 1 or 0; NaN: not known. None: there is no telling.
        reward: The reward function that says so, or that does not.
        threshold: The least reward of a correct completion.
        note: If there is no telling, why; or why it may be taken for something that it is not.
    """

    values: Floats | None
    reward: str
    threshold: float
    note: str | None = None


def successes(sheet: Sheet, reward: str | None, threshold: float) -> Success:
    """Tell which completions are correct.

    Args:
        sheet: The completions.
        reward: The reward function that says so; None: the first one, if it gives nothing but 0 and 1.
        threshold: The least reward of a correct completion.
    """
    if reward is not None:
        named = sheet.rewards[:, :, sheet.reward_names.index(reward)]
        return Success(values=_reached(named, threshold), reward=reward, threshold=threshold)
    name, first = sheet.reward_names[0], sheet.rewards[:, :, 0]
    given = first[~np.isnan(first)]
    values: Floats | None = _reached(first, 1.0)
    note: str | None = None
    if not given.size:
        values, note = None, f"the reward {name} applied to no completion"
    elif not np.isin(given, (0.0, 1.0)).all():
        values = None
        note = f"the reward {name} gives other values than 0 and 1; eval.success can say which completions are correct"
    elif not given.any():
        note = f"the reward {name} gave nothing but 0, so that no completion counts as correct; if it is graded, eval.success says which ones are"
    return Success(values=values, reward=name, threshold=1.0, note=note)


def measures(sheet: Sheet, success: Success, sizes: tuple[int, ...]) -> dict[str, Measure]:
    """Compute all metrics that are means over prompts.

    Args:
        sheet: The completions.
        success: Which of them are correct.
        sizes: The k of pass@k. A prompt with fewer completions that are known to be correct or not is left out of it.

    Returns:
        reward, reward/{name}/mean, avg@G, pass@k, maj@G, completions/mean_length, completions/clipped_ratio by name; what cannot be told
        is missing.
    """
    found = {"reward": _mean_of(_weighted(sheet))}
    for column, name in enumerate(sheet.reward_names):
        found[f"reward/{name}/mean"] = _mean_of(sheet.rewards[:, :, column])
    if success.values is not None:
        found |= _of_success(sheet, success.values, sizes)
    found["completions/mean_length"] = _mean_of(sheet.lengths)
    found["completions/clipped_ratio"] = _mean_of(sheet.truncated.astype(np.float64))
    return found


def _of_success(sheet: Sheet, values: Floats, sizes: tuple[int, ...]) -> Mapping[str, Measure]:
    found = {f"avg@{sheet.num_generations}": _mean_of(values)}
    known = ~np.isnan(values)
    tries, correct = known.sum(axis=1), np.where(known, values, 0.0).sum(axis=1)
    for size in sizes:
        rated = [
            pass_at_k(n, c, size) if n >= size else np.nan
            for n, c in zip(tries.tolist(), correct.astype(int).tolist(), strict=True)
        ]
        found[f"pass@{size}"] = _once_a_prompt(rated)
    if sheet.answers is not None:
        found[f"maj@{sheet.num_generations}"] = _once_a_prompt(
            [_majority(answers, row) for answers, row in zip(sheet.answers, values.tolist(), strict=True)]
        )
    return found


def _majority(answers: tuple[str | None, ...], success: list[float]) -> float:
    """Take the vote of the completions of one prompt that are known to be correct or not; NaN without any."""
    voters = [(answer, one) for answer, one in zip(answers, success, strict=True) if not np.isnan(one)]
    if not voters:
        return float("nan")
    return majority_success([answer for answer, _ in voters], [one for _, one in voters])


def _weighted(sheet: Sheet) -> Floats:
    """Sum the rewards of each completion [P, G]; NaN where none applied."""
    weighted = np.nansum(sheet.rewards * np.array(sheet.reward_weights), axis=-1)
    return np.where(np.isnan(sheet.rewards).all(axis=-1), np.nan, weighted)


def _reached(rewards: Floats, threshold: float) -> Floats:
    """Compare in float32, as rewards are kept: one of 0.9 is a little below what a Python float has for 0.9."""
    reached = rewards.astype(np.float32) >= np.float32(threshold)
    return np.where(np.isnan(rewards), np.nan, reached.astype(np.float64))


def _mean_of(values: Floats) -> Measure:
    """Average over completions [P, G]."""
    known = ~np.isnan(values)
    return Measure(totals=np.where(known, values, 0.0).sum(axis=1), counts=known.sum(axis=1).astype(np.float64))


def _once_a_prompt(values: list[Any]) -> Measure:
    """Average over prompts [P]."""
    return _mean_of(np.array(values, dtype=np.float64).reshape(-1, 1))
