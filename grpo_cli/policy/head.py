"""The language-model head: log-probabilities and entropies from hidden states, a few rows of logits at a time.

A plain linear head goes through one autograd function of our own. It does what the mathematics needs and no more: the logits
once in the forward, once more in the backward, and one product each for the gradients of hidden states and weights. Any other
head (adapters, quantised weights, hooks of sharding wrappers) is called as the module it is, in checkpointed chunks.

Letters: C completion tokens, c those of one chunk, H hidden size, V vocabulary.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from grpo_cli.distribution import filter_logits
from grpo_cli.policy.products import add_product, operand_dtype, project, sum_dtype
from grpo_cli.sharding import is_of_deepspeed
from grpo_cli.types import Sampling

LOGITS_PER_CHUNK = 2**22
"""Elements of one chunk of logits on a CPU: 16 MiB of float32. Four times as many are 3 % faster and add to the peak of memory."""

LOGITS_PER_CHUNK_ON_ACCELERATORS = 2**27
"""There a chunk should have more rows, since each one reads and writes the whole gradient of the weights."""

UNKNOWN_VOCABULARY = 2**18
"""Size that chunks are cut for if a head doesn't tell its own."""

LOG_OF_ZERO = -1000.0
"""Replaces -inf where a log-probability meets its probability as a factor: that one is exactly 0, and so is the product."""


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

    Logits, their softmax and the sum of the weights' gradient are float32, whatever the precision of the model. The memory
    for logits does not depend on C * V: a chunk has as many rows as fit into `LOGITS_PER_CHUNK`.

    Args:
        hidden: float [C, H], the states that predict the targets.
        head: Maps [.., H] to [.., V].
        scaling: The family's logit scaling.
        targets: int64 [C].
        positions: int64 [C], index of the target within its completion.
        sampling: The distribution that completions are drawn from; log-probabilities are taken under it.
        entropy_grad: Whether the entropies are differentiable.

    Returns:
        logps, entropies: float32 [C] each (float64 for a head in float64). They can be differentiated once.
    """
    if is_plain_linear(head):
        law = _Law(scaling=scaling, sampling=sampling, operand_dtype=operand_dtype(hidden, head.weight))
        statistics: tuple[Tensor, Tensor] = _LinearStatistics.apply(  # type: ignore[no-untyped-call]
            hidden, head.weight, head.bias, targets, positions, law, entropy_grad
        )
        return statistics

    def chunk_statistics(rows: Tensor, chunk_targets: Tensor, chunk_positions: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(rows)
        logits = scaling(logits.to(sum_dtype(logits)))
        return statistics_of_logits(
            logits, targets=chunk_targets, positions=chunk_positions, sampling=sampling, entropy_grad=entropy_grad
        )

    logps, entropies = [], []
    for chunk in _chunks(hidden, getattr(head, "out_features", UNKNOWN_VOCABULARY)):
        inputs = hidden[chunk], targets[chunk], positions[chunk]
        if torch.is_grad_enabled():
            outcome = checkpoint(chunk_statistics, *inputs, use_reentrant=False)
        else:
            outcome = chunk_statistics(*inputs)
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
        sampling: Temperature, filters, tokens that are banned, and stop tokens that are before `min_tokens`.
        entropy_grad: Whether the entropies are differentiable.

    Returns:
        logps, entropies: float32 [C] each.
    """
    if (temperature := _temperature(sampling)) != 1.0:
        logits = logits / temperature
    if _excludes(sampling):
        logits = logits.clone()
        _exclude(logits, targets=targets, positions=positions, sampling=sampling)
    log_probabilities = logits.log_softmax(dim=-1)
    logps = log_probabilities.gather(1, targets[:, None])[:, 0]
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_grad):
        # 0 * -inf is 0 here, in value and in gradient.
        finite = log_probabilities.masked_fill(log_probabilities == -torch.inf, 0.0)
        entropies = -(log_probabilities.exp() * finite).sum(dim=-1)
    return logps, entropies


def is_plain_linear(head: nn.Module) -> TypeGuard[nn.Linear]:
    """Tell whether calling a head does nothing but multiply by its weight and add its bias.

    Adapters, quantised and parametrised layers are of another type; sharding wrappers hook the module, replace its `forward`,
    or make its weight a tensor of another type. DeepSpeed's hooks only bring the weight together, which reading it in the policy's
    forward does as well, and once: each call of the module would be an exchange, of which processes with fewer chunks make fewer.
    """
    hooks = head._forward_hooks, head._forward_pre_hooks, head._backward_hooks, head._backward_pre_hooks  # noqa: SLF001  there are no public names
    return (
        type(head) is nn.Linear
        and type(head.weight) in {nn.Parameter, Tensor}
        and "forward" not in vars(head)
        and (is_of_deepspeed(head.weight) or not any(hooks))
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Law:
    """How a linear head's outputs y = W h + b become logits z of the sampling distribution.

    z = factor / temperature * y, or softcap / temperature * tanh(factor / softcap * y); then some are excluded.

    Attributes:
        scaling: The family's logit scaling.
        sampling: Temperature and what is excluded.
        operand_dtype: Of the factors of matrix products, which are summed in `sum_dtype`.
    """

    scaling: LogitScaling
    sampling: Sampling
    operand_dtype: torch.dtype

    @property
    def slope(self) -> float:
        """Derivative of z with respect to y; with a softcap, where y is 0."""
        return self.scaling.factor / _temperature(self.sampling)

    def transform(self, outputs: Tensor, *, slopes: Tensor | None = None) -> None:
        """Turn y into z in place, before anything is excluded.

        Args:
            outputs: [c, V].
            slopes: [c, V], overwritten by the derivative of the softcap: d z / d y relative to `slope`.
        """
        softcap = self.scaling.softcap
        if softcap is None:
            if self.slope != 1.0:
                outputs.mul_(self.slope)
            return
        outputs.mul_(self.scaling.factor / softcap).tanh_()
        if slopes is not None:
            torch.mul(outputs, outputs, out=slopes).neg_().add_(1.0)
        outputs.mul_(softcap / _temperature(self.sampling))


class _LinearStatistics(torch.autograd.Function):
    """Log-probabilities of targets t, and entropies, under a linear head.

    With p = softmax(z), a row's log-probability is z_t - log sum_j exp z_j and its entropy H = -sum_j p_j log p_j, so

        d logp / d z_j = [j = t] - p_j            d H / d z_j = -p_j (log p_j + H)

    Between forward and backward only the inputs and a few numbers per row are kept; all work on [c, V] is in place.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        positions: Tensor,
        law: _Law,
        entropy_grad: bool,  # noqa: FBT001  `apply` takes no keywords
    ) -> tuple[Tensor, Tensor]:
        operand = weight.to(law.operand_dtype)
        buffers = _buffers(2, hidden, weight)
        # Of each row: its results, log sum_j exp z_j, and its smallest logit that filters keep.
        logps, entropies, log_sums, thresholds = (buffers.new_empty(len(hidden)) for _ in range(4))
        for chunk in _chunks(hidden, len(weight)):
            logits, exponentials = buffers[:, : chunk.stop - chunk.start]
            law.transform(project(hidden[chunk].to(operand.dtype), operand, bias, out=logits))
            if _excludes(law.sampling):
                which = {"targets": targets[chunk], "positions": positions[chunk]}
                thresholds[chunk] = _exclude(logits, sampling=law.sampling, **which)
            largest = logits.amax(dim=1, keepdim=True)
            own = logits.sub_(largest).gather(1, targets[chunk, None])[:, 0]
            sums = torch.exp(logits, out=exponentials).sum(dim=1)
            if _excludes(law.sampling) or bias is not None:
                logits.clamp_(min=LOG_OF_ZERO)
            logps[chunk] = own - sums.log()
            entropies[chunk] = sums.log() - exponentials.mul_(logits).sum(dim=1) / sums
            log_sums[chunk] = sums.log() + largest[:, 0]
        ctx.law = law
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, targets, positions, logps, entropies, log_sums, thresholds)
        if not entropy_grad:
            ctx.mark_non_differentiable(entropies)
        return logps, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logps: Tensor | None, grad_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, positions, logps, entropies, log_sums, thresholds = ctx.saved_tensors
        law: _Law = ctx.law
        operand = weight.to(law.operand_dtype)
        grad_hidden, grad_weight, grad_bias = (
            torch.zeros_like(value, dtype=log_sums.dtype) if needed else None
            for value, needed in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        )
        # d loss / d y_j is slope * (own [j = t] + p_j (common + of_log log p_j)), the slope of a softcap still to come.
        of_logp = (torch.zeros_like(logps) if grad_logps is None else grad_logps) * law.slope
        of_log = None if grad_entropies is None else -grad_entropies * law.slope
        common = -of_logp if of_log is None else of_log * entropies - of_logp
        own = of_logp.masked_fill(logps == -torch.inf, 0.0)  # an excluded target's logit is no function of anything
        buffers = _buffers(1 + (of_log is not None) + (law.scaling.softcap is not None), hidden, weight)
        for chunk in _chunks(hidden, len(weight)):
            logits, *spare = buffers[:, : chunk.stop - chunk.start]
            slopes = None if law.scaling.softcap is None else spare.pop()
            rows = hidden[chunk].to(operand.dtype)
            law.transform(project(rows, operand, bias, out=logits), slopes=slopes)
            if _excludes(law.sampling):
                which = {"targets": targets[chunk], "positions": positions[chunk], "thresholds": thresholds[chunk]}
                _exclude(logits, sampling=law.sampling, **which)
            log_probabilities = logits.sub_(log_sums[chunk, None])
            if of_log is None:
                gradient = log_probabilities.exp_().mul_(common[chunk, None])
            else:
                probabilities = torch.exp(log_probabilities, out=spare.pop())
                factors = log_probabilities.clamp_(min=LOG_OF_ZERO).mul_(of_log[chunk, None]).add_(common[chunk, None])
                gradient = factors.mul_(probabilities)
            gradient.scatter_add_(1, targets[chunk, None], own[chunk, None])
            if slopes is not None:
                gradient.mul_(slopes)
            if grad_bias is not None:
                grad_bias.add_(gradient.sum(dim=0))
            gradient = gradient.to(operand.dtype)
            if grad_hidden is not None:
                add_product(gradient, operand, to=grad_hidden[chunk])
            if grad_weight is not None:
                add_product(gradient.t(), rows, to=grad_weight)
        gradients = (grad_hidden, hidden), (grad_weight, weight), (grad_bias, bias)
        rounded = (None if gradient is None else gradient.to(value.dtype) for gradient, value in gradients)
        return *rounded, None, None, None, None


def _temperature(sampling: Sampling) -> float:
    """What logits are divided by: nothing under greedy decoding, whose temperature is 0."""
    return sampling.temperature or 1.0


def _filters(sampling: Sampling) -> bool:
    return bool(sampling.top_k or sampling.top_p < 1.0 or sampling.min_p)


def _excludes(sampling: Sampling) -> bool:
    """Tell whether some tokens may have probability 0."""
    return bool(sampling.min_tokens or sampling.banned_ids) or _filters(sampling)


def _exclude(
    logits: Tensor, *, targets: Tensor, positions: Tensor, sampling: Sampling, thresholds: Tensor | None = None
) -> Tensor:
    """Set the logits of tokens that cannot be drawn to -inf, in place.

    Args:
        logits: [c, V], divided by the temperature.
        targets: int64 [c]; filters keep them.
        positions: int64 [c], index of the target within its completion.
        sampling: Filters, tokens that are banned, and stop tokens that are before `min_tokens`.
        thresholds: What an earlier call for the same logits returned; it saves the sorting.

    Returns:
        [c], the smallest logit of each row that filters keep; -inf without filters.
    """
    if sampling.banned_ids:
        banned = torch.tensor(sampling.banned_ids, dtype=torch.long, device=logits.device)
        logits.index_fill_(1, banned, -torch.inf)
    if sampling.min_tokens > 0:
        stops = torch.tensor(sorted(set(sampling.stop_ids)), dtype=torch.long, device=logits.device)
        early = (positions < sampling.min_tokens)[:, None]
        logits.index_copy_(1, stops, logits.index_select(1, stops).masked_fill(early, -torch.inf))
    if not _filters(sampling):
        return logits.new_full((len(logits),), -torch.inf)
    if thresholds is None:
        kept = filter_logits(logits.detach(), top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)
        thresholds = kept.masked_fill(kept == -torch.inf, torch.inf).amin(dim=1)
    # A target that this policy would no longer keep has been sampled all the same: its log-probability must be finite.
    excluded = (logits.detach() < thresholds[:, None]).scatter_(1, targets[:, None], False)
    logits.masked_fill_(excluded, -torch.inf)
    return thresholds


def _chunks(hidden: Tensor, vocabulary: int) -> Iterator[slice]:
    """Cut the rows of hidden [C, H] into as few chunks as hold their logits, all of about the same size."""
    size = _rows_per_chunk(hidden, vocabulary)
    for start in range(0, len(hidden), size):
        yield slice(start, min(start + size, len(hidden)))


def _rows_per_chunk(hidden: Tensor, vocabulary: int) -> int:
    on_cpu = hidden.device.type == "cpu"
    most = max(1, (LOGITS_PER_CHUNK if on_cpu else LOGITS_PER_CHUNK_ON_ACCELERATORS) // vocabulary)
    chunks = max(1, math.ceil(len(hidden) / most))
    return math.ceil(len(hidden) / chunks) or 1


def _buffers(count: int, hidden: Tensor, weight: Tensor) -> Tensor:
    """Allocate room for `count` times a chunk's logits: [count, c, V]."""
    rows = _rows_per_chunk(hidden, len(weight))
    return weight.new_empty(count, rows, len(weight), dtype=sum_dtype(weight))
