"""From what vLLM sampled to the project's own values; the same for a server and for an engine in this process."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from grpo_cli.errors import TrainingError
from grpo_cli.types import Completion, FinishReason, Group, PolicyVersion, Prompt

_NO_LOGP = -9999.0
"""What vLLM's server puts for minus infinity, which JSON does not have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledTokens:
    """One completion as vLLM returns it.

    Attributes:
        ids: Sampled tokens [L], the stop token included; never empty.
        logps: Their log-probabilities [L]; None where vLLM gave none.
        finish_reason: Why it ended.
    """

    ids: tuple[int, ...]
    logps: tuple[float | None, ...]
    finish_reason: FinishReason


def completed_group(
    prompt: Prompt, sampled: Sequence[SampledTokens], *, tokenizer: Any, version: PolicyVersion
) -> Group:
    """Put the completions of a prompt together. Their text is what the run's own tokenizer makes of the tokens.

    Args:
        prompt: What was completed.
        sampled: G completions in the order of their index.
        tokenizer: Decodes them, special tokens left out.
        version: Of the weights that sampled them.

    Returns:
        The group. A log-probability that vLLM did not give, or that is not finite, is NaN.
    """
    texts: list[str] = tokenizer.batch_decode([list(one.ids) for one in sampled], skip_special_tokens=True)
    return Group(
        prompt=prompt,
        completions=tuple(
            Completion(
                index=index,
                ids=one.ids,
                logps=torch.tensor([_known(logp) for logp in one.logps], dtype=torch.float32),
                text=text,
                finish_reason=one.finish_reason,
                policy_version=version,
            )
            for index, (one, text) in enumerate(zip(sampled, texts, strict=True))
        ),
    )


def sampled_tokens(output: Any) -> SampledTokens:
    """Read a completion of an engine in this process.

    Raises:
        TrainingError: If it ended for a reason that no completion should have.
    """
    if output.finish_reason not in tuple(FinishReason):
        raise TrainingError(f"vLLM ended a completion for an unknown reason: {output.finish_reason}")
    return SampledTokens(
        ids=tuple(output.token_ids),
        logps=tuple(output.logprobs.logprobs),
        finish_reason=FinishReason(output.finish_reason),
    )


def _known(logp: float | None) -> float:
    """Give NaN for a log-probability that says nothing."""
    return logp if logp is not None and math.isfinite(logp) and logp > _NO_LOGP else math.nan
