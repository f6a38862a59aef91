"""Runs that cannot learn, or not from what they sample: notice it after a few steps and say what to do."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from grpo_cli.engine.masked import Masked
from grpo_cli.types import FinishReason, ScoredGroup

PATIENCE = 3
"""Generations in a row before a warning, or optimizer steps."""

MASKED_SHARE = 1 / 3
"""Share of a step's completions that the rollout correction may mask without a warning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthWarning:
    """A warning and the key that its repeats are counted under."""

    key: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Signs:
    """What is true of all groups of a generation, or of some; of none, all of it.

    Attributes:
        truncated: Every completion was cut.
        unscored: No reward function applied to any.
        equal: The rewards within each group are equal.
    """

    truncated: bool
    unscored: bool
    equal: bool

    @classmethod
    def of(cls, scored: Sequence[ScoredGroup]) -> Self:
        """Look at some groups."""
        completions = (completion for one in scored for completion in one.group.completions)
        return cls(
            truncated=all(completion.finish_reason is FinishReason.LENGTH for completion in completions),
            unscored=all(bool(torch.isnan(one.rewards).all()) for one in scored),
            equal=all(_equal(one.rewards) for one in scored),
        )


class RunHealth:
    """Counts generations in a row that give no signal."""

    def __init__(self) -> None:
        self._in_a_row = {"truncated": 0, "unscored": 0, "equal": 0, "masked": 0}

    def observe(self, signs: Signs) -> list[HealthWarning]:
        """Take in the signs of one generation, and give the warnings that are due."""
        seen_of = {
            "truncated": signs.truncated,
            "unscored": signs.unscored,
            "equal": signs.equal and not signs.unscored,
        }
        return [
            HealthWarning(key=f"health/{key}", message=_MESSAGES[key])
            for key, seen in seen_of.items()
            if self._too_often(key, seen=seen)
        ]

    def observe_masked(self, masked: Masked) -> list[HealthWarning]:
        """Look at what the rollout correction leaves of one optimizer step, and give the warning if it is due."""
        number, others = round(masked.lengths.count), round(masked.other_lengths.count)
        if not self._too_often("masked", seen=number > MASKED_SHARE * (number + others)):
            return []
        text = f"the rollout correction leaves {number} of {number + others} completions of this step out of the policy term"
        if others:
            text += f"; they have {masked.lengths.result():.0f} tokens on average, the others {masked.other_lengths.result():.0f}"
        return [HealthWarning(key="health/masked", message=f"{text}: {_MASKED_ADVICE}")]

    def _too_often(self, key: str, *, seen: bool) -> bool:
        """Count how often a sign was seen in a row."""
        self._in_a_row[key] = self._in_a_row[key] + 1 if seen else 0
        return self._in_a_row[key] >= PATIENCE

    def state_dict(self) -> dict[str, int]:
        """Give the counters for a checkpoint."""
        return dict(self._in_a_row)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the counters."""
        self._in_a_row.update(state)


_MESSAGES = {
    "truncated": (
        f"every completion of the last {PATIENCE} generations was cut at generation.max_completion_length: raise it, or check that "
        "the model's stop token is sampled (generation.stop, generation.stop_token_ids)"
    ),
    "unscored": (
        f"no reward function applied to any completion of the last {PATIENCE} generations (all None): nothing is learned; check the "
        "columns that the reward functions look at"
    ),
    "equal": (
        f"all rewards within each group were equal in the last {PATIENCE} generations, so every advantage is 0 and nothing is "
        "learned: the task may be too easy or too hard, the temperature too low, or the reward too coarse"
    ),
}

_MASKED_ADVICE = (
    "set vllm.importance_sampling_mode to token_truncate (a product over a long completion leaves the bounds by rounding alone), or "
    "widen vllm.importance_sampling_clip_max and _min; sampling/logp_difference tells how far vLLM and the trainer are apart"
)


def _equal(rewards: torch.Tensor) -> bool:
    """Tell whether a group's rewards [G, F] give no signal."""
    return bool((torch.nan_to_num(rewards, nan=-1e30) == torch.nan_to_num(rewards[:1], nan=-1e30)).all())
