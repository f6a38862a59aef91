"""From per-token values [K] to a scalar: one function per normalisation.

All divide by totals of the optimizer step, so that the results of its micro-batches add up to the step's. Over processes the gradients
are summed, not averaged. An empty step has loss 0.
"""

from collections.abc import Callable

from torch import Tensor

from grpo_cli.objective.sequences import Sequences
from grpo_cli.types import StepTotals

Aggregate = Callable[[Tensor, Sequences, StepTotals, int], Tensor]
"""(values [K], sequences, totals, max_completion_length) -> scalar."""


def mean_of_sequence_means(values: Tensor, sequences: Sequences, totals: StepTotals, _: int) -> Tensor:
    """Mean over each sequence's tokens, then over sequences, masked ones counted (GRPO, Shao et al. 2024, arXiv:2402.03300, eq. 3)."""
    return sequences.mean(values).sum() / max(totals.sequences, 1.0)


def mean_over_tokens(values: Tensor, _sequences: Sequences, totals: StepTotals, _: int) -> Tensor:
    """Mean over all tokens of the step (DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 8)."""
    return values.sum() / max(totals.completion_tokens, 1.0)


def mean_over_local_tokens(values: Tensor, _sequences: Sequences, totals: StepTotals, _: int) -> Tensor:
    """Mean over this process's tokens, then over processes: depends on how completions are spread over them."""
    return values.sum() / max(totals.local_tokens, 1.0) / totals.processes


def sum_over_constant_length(
    values: Tensor, _sequences: Sequences, totals: StepTotals, max_completion_length: int
) -> Tensor:
    """Sum over tokens by a constant, whatever their number (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783)."""
    return values.sum() / (max(totals.sequences, 1.0) * max_completion_length)


def mean_of_sequence_sums(values: Tensor, _sequences: Sequences, totals: StepTotals, _: int) -> Tensor:
    """Sum over each sequence's tokens, then mean over sequences: weighs by length (LUSPO, 2026, arXiv:2602.05261)."""
    return values.sum() / max(totals.sequences, 1.0)
