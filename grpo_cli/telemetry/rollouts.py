"""Metrics of sampled completions: how long they are, and how many were cut."""

from collections.abc import Iterable, Sequence

from grpo_cli.metrics import Max, Mean, MetricValue, Min
from grpo_cli.types import Completion, FinishReason, ScoredGroup


def rollout_metrics(groups: Sequence[ScoredGroup]) -> dict[str, MetricValue]:
    """Measure the completions of some groups; outcomes of several calls merge.

    A length counts the sampled tokens, the stop token included. A completion is terminated if it ended by itself, and clipped if
    it reached its maximum length. Groups dropped by `rewards.on_error` count too: their completions were sampled.

    Returns:
        completions/{mean,min,max}_length over all, completions/{mean,min,max}_terminated_length over the terminated ones (NaN
        if there are none), and completions/clipped_ratio, the share of clipped ones.
    """
    completions = [completion for scored in groups for completion in scored.group.completions]
    terminated = [completion for completion in completions if completion.finish_reason is FinishReason.STOP]
    clipped = len(completions) - len(terminated)
    return {
        **_lengths("length", completions),
        **_lengths("terminated_length", terminated),
        "completions/clipped_ratio": Mean(clipped, len(completions)),
    }


def _lengths(name: str, completions: Iterable[Completion]) -> dict[str, MetricValue]:
    """Mean, least and greatest number of tokens."""
    lengths = [len(completion.ids) for completion in completions]
    return {
        f"completions/mean_{name}": Mean(sum(lengths), len(lengths)),
        f"completions/min_{name}": Min(min(lengths, default=float("inf"))),
        f"completions/max_{name}": Max(max(lengths, default=float("-inf"))),
    }
