"""One optimizer step: totals, micro-batches, gradients. And the passes that only look: old, reference, entropies."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from grpo_cli.engine.batching import micro_batches, step_totals, without_idle
from grpo_cli.engine.distributed import Processes
from grpo_cli.metrics import Mean, Metrics, MetricValue, Sum, merge
from grpo_cli.objective.loss import ObjectiveSettings, loss
from grpo_cli.objective.masks import entropy_threshold
from grpo_cli.types import MicroBatch, PolicyLogps, StepTotals, TokenStats, TrainingGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientPass:
    """Turns groups into gradients.

    Attributes:
        processes: The processes of this run.
        settings: The objective.
        micro_batch_tokens: Most tokens in one forward.
        shares_prefix: Whether the policy feeds a prompt once for its completions.
    """

    processes: Processes
    settings: ObjectiveSettings
    micro_batch_tokens: int
    shares_prefix: bool

    def accumulate(self, policy: nn.Module, groups: Sequence[TrainingGroup], logps: Sequence[PolicyLogps]) -> Metrics:
        """Add the gradient of an optimizer step to the policy's parameters, and give its metrics.

        Completions that add nothing to the gradient are left out of the forward, but not of the denominators.
        """
        needed = [
            without_idle(group, entry, zero_advantages_count=self._zero_advantages_count)
            for group, entry in zip(groups, logps, strict=True)
        ]
        batches = self._batches([group for group, _ in needed], [entry for _, entry in needed])
        totals = self._totals(policy, groups, batches)
        skipped = _tokens(groups) - _tokens([group for group, _ in needed])
        nothing = {"loss": Sum(0), "tokens/useful": Sum(0), "tokens/computed": Sum(0), "tokens/skipped": Sum(skipped)}
        outcomes: list[Metrics] = [nothing]
        if not batches:
            _set_zero_gradient(policy)
        for batch in batches:
            stats: TokenStats = policy(batch.segments, entropy_grad=self.settings.entropy_coef != 0)
            output = loss(stats, batch.tokens, totals, self.settings)
            self.processes.backward(output.loss)
            step_share: dict[str, MetricValue] = {
                "loss": Sum(output.loss.item()),
                "tokens/useful": Sum(stats.tokens_useful),
                "tokens/computed": Sum(stats.tokens_computed),
            }
            outcomes.append({**output.metrics, **step_share})
        return merge(outcomes)

    @torch.no_grad()
    def logps(self, policy: nn.Module, groups: Sequence[TrainingGroup]) -> list[tuple[Tensor, ...]]:
        """Compute log-probabilities of every completion under a model: per group G tensors, float32 [L], CPU."""
        batches = self._batches(groups, [PolicyLogps()] * len(groups))
        flat = torch.cat([torch.empty(0), *(policy(batch.segments).logps.float().cpu() for batch in batches)])
        parts = iter(torch.split(flat, [len(ids) for group in groups for ids in group.completion_ids]))
        return [tuple(next(parts) for _ in group.completion_ids) for group in groups]

    def _batches(self, groups: Sequence[TrainingGroup], logps: Sequence[PolicyLogps]) -> list[MicroBatch]:
        return micro_batches(
            groups,
            logps,
            micro_batch_tokens=self.micro_batch_tokens,
            shares_prefix=self.shares_prefix,
            device=self.processes.device,
        )

    @property
    def _zero_advantages_count(self) -> bool:
        """Whether completions with advantage 0 have a gradient all the same, or a say in another completion's."""
        settings = self.settings
        return settings.beta != 0 or settings.entropy_coef != 0 or settings.top_entropy_quantile < 1

    def _totals(self, policy: nn.Module, groups: Sequence[TrainingGroup], batches: Sequence[MicroBatch]) -> StepTotals:
        """Count the step's denominators. An entropy quantile is one of the whole step, so it takes a pass of its own."""
        totals = step_totals(groups)
        if self.settings.top_entropy_quantile >= 1.0 or not batches:
            return totals
        with torch.no_grad():
            entropies = torch.cat([policy(batch.segments).entropies for batch in batches])
        in_loss = torch.cat([batch.tokens.loss_mask for batch in batches])
        threshold = entropy_threshold(entropies, in_loss, self.settings.top_entropy_quantile)
        kept = int(((entropies >= threshold) & in_loss).sum())
        return replace(totals, entropy_threshold=threshold, entropy_tokens=kept)


def _tokens(groups: Sequence[TrainingGroup]) -> int:
    """Count completion tokens."""
    return sum(len(ids) for group in groups for ids in group.completion_ids)


def _set_zero_gradient(policy: nn.Module) -> None:
    """Give every trained parameter a gradient of 0, so that momentum goes on as it does after any gradient of 0."""
    for parameter in policy.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def gradient_metrics(norm: float, learning_rate: float) -> Metrics:
    """Report the gradient's norm before clipping, and the learning rate it was applied with."""
    return {"grad_norm": Mean(norm, 1), "learning_rate": Mean(learning_rate, 1)}
