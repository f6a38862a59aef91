"""The language-model head: log-probabilities and entropies from hidden states, a few rows of logits at a time.

Letters: C completion tokens, H hidden size, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grpo_cli.distribution import filter_logits
from grpo_cli.types import Sampling

ROWS_PER_CHUNK = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitScaling:
    """What a model family does to its logits after the head.

    Attributes:
        factor: Multiplies them (Cohere's `logit_scale`, one over Granite's `logits_scaling`).
        softcap: Bounds them: softcap * tanh(logits / softcap) (Gemma 2); None for no bound.
    """

    factor: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: Any) -> "LogitScaling":
        """Read a transformers configuration."""
        factor = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )
        return cls(factor=factor, softcap=getattr(config, "final_logit_softcapping", None))

    def __call__(self, logits: Tensor) -> Tensor:
        """Apply it to logits [..., V]."""
        if self.factor != 1.0:
            logits = logits * self.factor
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def token_statistics(
    hidden: Tensor,
    *,
    head: nn.Module,
    scaling: LogitScaling,
    targets: Tensor,
    positions: Tensor,
    sampling: Sampling,
    entropy_grad: bool,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution.

    Never more than `ROWS_PER_CHUNK` rows of logits are alive: the backward recomputes them chunk by chunk.

    Args:
        hidden: float [C, H], the states that predict the targets.
        head: Maps [.., H] to [.., V].
        scaling: The family's logit scaling.
        targets: int64 [C].
        positions: int64 [C], index of the target within its completion.
        sampling: The distribution that completions are drawn from; log-probabilities are taken under it.
        entropy_grad: Whether the entropies are differentiable.

    Returns:
        logps, entropies: float32 [C] each.
    """

    def chunk_statistics(rows: Tensor, chunk_targets: Tensor, chunk_positions: Tensor) -> tuple[Tensor, Tensor]:
        logits = scaling(head(rows).float())
        return statistics_of_logits(
            logits, targets=chunk_targets, positions=chunk_positions, sampling=sampling, entropy_grad=entropy_grad
        )

    logps, entropies = [], []
    chunks = zip(*(torch.split(value, ROWS_PER_CHUNK) for value in (hidden, targets, positions)), strict=True)
    for rows, chunk_targets, chunk_positions in chunks:
        if torch.is_grad_enabled():
            outcome = checkpoint(chunk_statistics, rows, chunk_targets, chunk_positions, use_reentrant=False)
        else:
            outcome = chunk_statistics(rows, chunk_targets, chunk_positions)
        logps.append(outcome[0])
        entropies.append(outcome[1])
    return torch.cat(logps), torch.cat(entropies)


def statistics_of_logits(
    logits: Tensor, *, targets: Tensor, positions: Tensor, sampling: Sampling, entropy_grad: bool
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies under the sampling distribution, which always keeps the target.

    Args:
        logits: float32 [C, V], scaled by the family's rule, before temperature.
        targets: int64 [C].
        positions: int64 [C], index of the target within its completion.
        sampling: Temperature, filters, and stop tokens that are banned before `min_tokens`.
        entropy_grad: Whether the entropies are differentiable.

    Returns:
        logps, entropies: float32 [C] each.
    """
    if sampling.temperature not in (0.0, 1.0):
        logits = logits / sampling.temperature
    if sampling.min_tokens > 0:
        banned = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
        banned[list(sampling.stop_ids)] = True
        logits = logits.masked_fill((positions < sampling.min_tokens)[:, None] & banned, -torch.inf)
    if sampling.top_k or sampling.top_p < 1.0 or sampling.min_p:
        # A target that this policy would no longer keep has been sampled all the same: its log-probability must be finite.
        own = logits.gather(1, targets[:, None])
        kept = filter_logits(logits, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)
        logits = kept.scatter(1, targets[:, None], own)
    log_probabilities = logits.log_softmax(dim=-1)
    logps = log_probabilities.gather(1, targets[:, None])[:, 0]
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_grad):
        # 0 * -inf is 0 here, in value and in gradient.
        finite = log_probabilities.masked_fill(log_probabilities == -torch.inf, 0.0)
        entropies = -(log_probabilities.exp() * finite).sum(dim=-1)
    return logps, entropies
