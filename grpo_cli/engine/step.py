"""One optimizer step: totals, micro-batches, gradients. And the passes that only look: old, reference, entropies."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from grpo_cli.device_memory import trim_heap
from grpo_cli.engine.batching import (
    active_completions,
    by_completion,
    micro_batch_size,
    micro_batches,
    only,
    only_logps,
    sequence_tokens,
    step_totals,
)
from grpo_cli.engine.distributed import Processes
from grpo_cli.engine.strategies.strategy import Strategy
from grpo_cli.engine.token_budget import TokenBudget
from grpo_cli.metrics import Mean, Metrics, MetricValue, Sum, merge
from grpo_cli.objective.loss import ObjectiveSettings, loss
from grpo_cli.objective.masks import entropy_threshold
from grpo_cli.policy.split_prompt import SplitPrompt
from grpo_cli.types import MicroBatch, PolicyLogps, Segment, StepTotals, TokenStats, TrainingGroup

IDLE = (Segment(prompt_ids=(0,), completion_ids=((0,),)),)
"""What a process computes that has to take part and has nothing to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one process trains on in a step.

    Attributes:
        groups: Its completions.
        active: By the number of a group, the indices of its completions that go through the model; groups without any are left out.
    """

    groups: Sequence[TrainingGroup]
    active: Mapping[int, Sequence[int]]

    def computed(self) -> list[TrainingGroup]:
        """Give the groups with only the completions that go through the model."""
        return [only(self.groups[number], indices) for number, indices in self.active.items()]

    def by_completion(self, found: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """Put what was found of the completion tokens into place.

        Args:
            found: Per micro-batch float [C].

        Returns:
            Per group G tensors, float32 [L], CPU; zeros for what was not computed.
        """
        joined = torch.cat(list(found)).float().cpu() if found else torch.empty(0)  # in one transfer
        return by_completion(joined, self.groups, self.active)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepGradient:
    """What is known of an optimizer step once its gradient is computed.

    Attributes:
        metrics: Those of the objective, and the tokens it took, of all processes.
        current: Per micro-batch float [C], on the device, no gradient: log-probabilities of this process's completion tokens.
        share: What this process computed of the step.
    """

    metrics: Metrics
    current: Sequence[Tensor]
    share: Share

    def logps(self) -> list[tuple[Tensor, ...]]:
        """Log-probabilities under the weights that the gradient is of: per group G tensors, float32 [L], CPU; zeros for what was left out.

        They come from the device only when they are asked for: most runs go over a step once and do not read them.
        """
        return self.share.by_completion(self.current)


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientPass:
    """Turns groups into gradients. Each process has its own, which together are the step's.

    Attributes:
        processes: The processes of this run.
        strategy: How they train together.
        settings: The objective.
        budget: Most tokens in one forward.
        shares_prefix: Whether the policy feeds a prompt once for its completions.
        splits_prompts: Whether it can do so for parts of a group.
    """

    processes: Processes
    strategy: Strategy
    settings: ObjectiveSettings
    budget: TokenBudget
    shares_prefix: bool
    splits_prompts: bool = True

    def accumulate(
        self, policy: nn.Module, groups: Sequence[TrainingGroup], logps: Sequence[PolicyLogps]
    ) -> StepGradient:
        """Make the gradient of the policy's parameters that of an optimizer step; what they had before is gone.

        Completions that add nothing to the gradient are left out of the forward, but not of the denominators.

        Args:
            policy: What is called instead of the policy in training.
            groups: This process's share of the step.
            logps: Old and reference log-probabilities of each group.

        Raises:
            TrainingError: If there is no memory for a single completion.
        """
        share = self._share(groups)
        totals, idle = self._totals(policy, share)
        # Together, and not whenever one process runs out of memory.
        expert_shares = self._expert_shares(policy, share) if self.processes.count > 1 else None
        began = time.monotonic()
        outcomes, current = self.budget.fit(
            lambda: self._accumulate(policy, share, logps, totals=totals, expert_shares=expert_shares, idle=idle)
        )
        seconds = time.monotonic() - began
        metrics = merge([self.processes.merge(merge(outcomes)), self._imbalance(seconds)])
        self.strategy.sum_gradients()
        self.budget.lower_to(self.processes.least(self.budget.tokens))
        return StepGradient(metrics=metrics, current=current, share=share)

    @torch.no_grad()
    def logps(self, policy: nn.Module, groups: Sequence[TrainingGroup]) -> list[tuple[Tensor, ...]]:
        """Compute log-probabilities under a model, and only those that `accumulate` will read. All processes do so at once.

        Args:
            policy: The model, as it is called in training.
            groups: Of this process.

        Returns:
            Per group G tensors, float32 [L], CPU; zeros for completions that add nothing to the gradient.

        Raises:
            TrainingError: If there is no memory for a single completion.
        """
        share = self._share(groups)
        return share.by_completion(self.budget.fit(lambda: [stats.logps for stats in self._statistics(policy, share)]))

    def active(self, group: TrainingGroup) -> list[int]:
        """Give the completions of a group that can add to the gradient.

        Zero advantages count if they have a gradient all the same, or a say in another completion's. Routers are balanced over all.
        """
        if self._balances_experts:
            return list(range(len(group.completion_ids)))
        settings = self.settings
        count = settings.beta != 0 or settings.entropy_coef != 0 or settings.top_entropy_quantile < 1
        return active_completions(group, zero_advantages_count=count)

    def _accumulate(
        self,
        policy: nn.Module,
        share: Share,
        logps: Sequence[PolicyLogps],
        *,
        totals: StepTotals,
        expert_shares: Tensor | None,
        idle: bool,
    ) -> tuple[list[Metrics], list[Tensor]]:
        """Make the gradients of this process's share; give its metrics, and the log-probabilities per micro-batch."""
        for parameter in policy.parameters():
            parameter.grad = None
        if self.processes.count == 1:  # it depends on how the step is split now
            expert_shares = self._expert_shares(policy, share)
        batches = self._batches(share, logps)
        idle_rounds = self._idle_rounds(len(batches), least=1)
        skipped = _tokens(share.groups) - _tokens(share.computed())
        nothing = {"loss": Sum(0), "tokens/useful": Sum(0), "tokens/computed": Sum(0), "tokens/skipped": Sum(skipped)}
        outcomes: list[Metrics] = [nothing]
        current: list[Tensor] = []
        if idle and not self.strategy.in_step:  # in all processes: what only this one leaves out, others add
            _set_zero_gradient(policy)
        for batch, prompt in _with_prompts(batches):
            with self._guard(batch):
                stats: TokenStats = policy(
                    batch.segments,
                    entropy_grad=self.settings.entropy_coef != 0,
                    routers=self._balances_experts,
                    expert_shares=expert_shares,
                    prompt=prompt,
                )
                output = loss(stats, batch.tokens, totals, self.settings)
                self.strategy.backward(output.loss)
            step_share: dict[str, MetricValue] = {
                "loss": Sum(output.loss.item()),
                "tokens/useful": Sum(stats.tokens_useful),
                "tokens/computed": Sum(stats.tokens_computed),
            }
            outcomes.append({**output.metrics, **step_share})
            current.append(stats.logps.detach())
            if prompt is not None and not batch.goes_on:
                self._backward_of(prompt)
            # The next micro-batch has other sizes, for which the room that this one leaves is too small.
            trim_heap(self.processes.device)
        for _ in range(idle_rounds):
            self._idle_round(policy, expert_shares)
        return outcomes, current

    def _idle_round(self, policy: nn.Module, expert_shares: Tensor | None) -> None:
        """Take part in a micro-batch of other processes: the same operations on next to nothing, and a gradient of 0."""
        stats: TokenStats = policy(
            IDLE,
            entropy_grad=self.settings.entropy_coef != 0,
            routers=self._balances_experts,
            expert_shares=expert_shares,
        )
        routers = stats.routers.loss if stats.routers is not None else 0.0
        self.strategy.backward(0.0 * (stats.logps.sum() + stats.entropies.sum() + routers))

    def _imbalance(self, seconds: float) -> Metrics:
        """Tell how much longer than the processes' mean the slowest one took for its gradients."""
        if self.processes.count == 1:
            return {}
        mean = self.processes.sum(torch.tensor([seconds], dtype=torch.float64)) / self.processes.count
        return {"processes/imbalance": Mean((self.processes.most(seconds) / mean).item(), 1)}

    def _backward_of(self, prompt: SplitPrompt) -> None:
        """Carry the gradients of completions that were fed in parts on through their prompt."""
        with self.budget.guard(tokens=len(prompt.ids), completions=1):
            rest = prompt.loss()
            if rest is not None:
                self.strategy.backward(rest)

    def _statistics(self, policy: nn.Module, share: Share, *, routers: bool = False) -> Iterator[TokenStats]:
        """Compute statistics of this process's share without a gradient."""
        batches = self._batches(share, [PolicyLogps()] * len(share.groups))
        idle_rounds = self._idle_rounds(len(batches))
        for batch, prompt in _with_prompts(batches):
            with torch.no_grad(), self._guard(batch):
                stats = policy(batch.segments, routers=routers, prompt=prompt)
            yield stats
        for _ in range(idle_rounds):
            with torch.no_grad():
                policy(IDLE, routers=routers)

    def _idle_rounds(self, batches: int, *, least: int = 0) -> int:
        """Count the micro-batches that this process has fewer than the one with most, where all have to do equally many."""
        return max(least, self.processes.most(batches)) - batches if self.strategy.in_step else 0

    def _expert_shares(self, policy: nn.Module, share: Share) -> Tensor | None:
        """Compute which share of the step's tokens goes to each expert; it takes a pass of its own if there are several micro-batches.

        The load-balancing loss is a product of two means over all tokens of the step. With one of them known beforehand it is a sum over
        micro-batches, and does not depend on how these are cut.
        """
        if not self._balances_experts:
            return None
        if self.processes.count == 1 and len(self._batches(share, [PolicyLogps()] * len(share.groups))) < 2:
            return None
        found = self.budget.fit(
            lambda: [stats.routers for stats in self._statistics(policy, share, routers=True) if stats.routers]
        )
        experts = self.processes.most(len(found[0].shares) if found else 0)
        if not experts:
            return None
        tokens = torch.zeros(experts + 1, dtype=torch.float64)  # by expert, and of all
        for one in found:
            tokens += torch.cat([one.shares.double().cpu() * one.tokens, torch.tensor([float(one.tokens)])])
        *by_expert, of_all = self.processes.sum(tokens).unbind()
        return (torch.stack(by_expert) / of_all).to(self.processes.device, torch.float32)

    @property
    def _balances_experts(self) -> bool:
        return self.settings.router_aux_loss_coef != 0

    def _guard(self, batch: MicroBatch) -> AbstractContextManager[None]:
        """Watch the memory of a micro-batch's forward and backward."""
        tokens = micro_batch_size(batch, shares_prefix=self.shares_prefix)
        return self.budget.guard(tokens=tokens, completions=batch.tokens.advantages.numel())

    def _share(self, groups: Sequence[TrainingGroup]) -> Share:
        active = {number: self.active(group) for number, group in enumerate(groups)}
        return Share(groups=groups, active={number: indices for number, indices in active.items() if indices})

    def _batches(self, share: Share, logps: Sequence[PolicyLogps]) -> list[MicroBatch]:
        return micro_batches(
            share.computed(),
            [only_logps(logps[number], indices) for number, indices in share.active.items()],
            micro_batch_tokens=self.budget.tokens,
            shares_prefix=self.shares_prefix,
            # The load-balancing loss of a part needs the router logits of its prompt.
            splits_prompts=self.splits_prompts and not self._balances_experts,
            device=self.processes.device,
        )

    def _totals(self, policy: nn.Module, share: Share) -> tuple[StepTotals, bool]:
        """Count the step's denominators, and tell whether no process has anything to compute.

        An entropy quantile is one of the whole step, so it takes a pass of its own.
        """
        own = step_totals(share.groups)
        counts = [own.completion_tokens, own.sequences, sequence_tokens(share.computed()), len(share.active)]
        tokens, sequences, router_tokens, groups = self.processes.sum(
            torch.tensor(counts, dtype=torch.float64)
        ).tolist()
        totals = StepTotals(
            completion_tokens=tokens,
            sequences=sequences,
            local_tokens=own.completion_tokens,
            processes=self.processes.count,
            entropy_tokens=tokens,
            router_tokens=router_tokens,
        )
        if self.settings.top_entropy_quantile >= 1.0 or groups == 0:
            return totals, groups == 0
        found = self.budget.fit(lambda: [stats.entropies for stats in self._statistics(policy, share)])
        own_entropies = [
            values[index]
            for number, values in enumerate(share.by_completion(found))
            for index in share.active.get(number, ())
            if share.groups[number].in_loss[index]
        ]
        entropies = self.processes.everyones(torch.cat([torch.empty(0), *own_entropies]))
        threshold = entropy_threshold(
            entropies, torch.ones_like(entropies, dtype=torch.bool), self.settings.top_entropy_quantile
        )
        kept = int((entropies >= threshold).sum())
        return replace(totals, entropy_threshold=threshold, entropy_tokens=kept), False


def _with_prompts(batches: Sequence[MicroBatch]) -> Iterator[tuple[MicroBatch, SplitPrompt | None]]:
    """Give each micro-batch that is a part of a group the prompt that it has in common with the other parts."""
    prompt: SplitPrompt | None = None
    for batch in batches:
        if prompt is None and batch.goes_on:
            prompt = SplitPrompt(batch.segments[0].prompt_ids)
        yield batch, prompt
        if not batch.goes_on:
            prompt = None


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
