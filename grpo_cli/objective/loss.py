"""The objective: composes ratio, surrogate, masks, KL, aggregation and entropy bonus to a loss. Knows no objective by name."""

import torch
from torch import Tensor

from grpo_cli.metrics import Max, Sum
from grpo_cli.objective.catalog import LossRow, row
from grpo_cli.objective.kl import k3_kl
from grpo_cli.objective.masks import high_entropy, near_policy
from grpo_cli.objective.measures import Measure, mean, read, sampling_measures
from grpo_cli.objective.settings import ObjectiveSettings
from grpo_cli.objective.terms import LossTerms, loss_terms
from grpo_cli.types import LossOutput, StepTotals, TokenBatch, TokenStats

__all__ = ["ObjectiveSettings", "loss"]


def loss(stats: TokenStats, tokens: TokenBatch, totals: StepTotals, settings: ObjectiveSettings) -> LossOutput:
    """Loss of one micro-batch.

        loss = aggregate(keep * correction * surrogate + beta * kl) - entropy_coef * mean entropy
               + router_aux_loss_coef * load-balancing loss

    The KL term is on all loss tokens; the masks (entropy quantile, off-policy sequences) and the correction act on the policy term
    only. Everything is divided by `totals`: the losses and gradients of a step's micro-batches and processes are to be summed.

    Args:
        stats: Log-probabilities and entropies [C], finite on loss tokens; differentiable where a gradient is wanted.
        tokens: What else is known about the same C tokens.
        totals: The step's denominators.
        settings: The objective and its constants.

    Returns:
        The loss, in the precision of `stats.logps`, and its metrics.

    Raises:
        ValueError: If the settings contradict each other, or the batch or totals lack what they ask for.
    """
    parts = row(settings)
    if (settings.top_entropy_quantile < 1.0) != (totals.entropy_threshold is not None):
        raise ValueError(
            f"top_entropy_quantile is {settings.top_entropy_quantile:g}, but the step's entropy_threshold is "
            f"{totals.entropy_threshold}"
        )
    terms = loss_terms(stats, tokens, settings)
    per_token = _policy_term(terms, parts, totals, settings)
    measures: dict[str, Measure] = {}
    if terms.reference is not None:
        kl = k3_kl(terms.logps, terms.reference, ratio=terms.ratio if settings.use_bias_correction_kl else None)
        per_token = per_token + settings.beta * kl
        measures["kl"] = mean(kl)
    value = parts.aggregate(per_token, terms.sequences, totals, settings.max_completion_length)
    if settings.entropy_coef != 0.0:
        measures["policy_loss"] = Measure(Sum, (value,))
        measures["entropy_coef"] = Measure(Max, (value.new_tensor(settings.entropy_coef),))
        value = value - settings.entropy_coef * _mean_entropy(terms, totals)
    if stats.routers is not None:
        balance = stats.routers.loss * (stats.routers.tokens / totals.router_tokens)
        measures["aux_loss"] = Measure(Sum, (balance,))
        value = value + settings.router_aux_loss_coef * balance
    measures["entropy"] = mean(terms.entropies)
    measures.update(parts.measures(terms, settings))
    measures.update(sampling_measures(terms, settings))
    return LossOutput(loss=value, metrics=read(measures))


def _policy_term(terms: LossTerms, parts: LossRow, totals: StepTotals, settings: ObjectiveSettings) -> Tensor:
    """Surrogate [K], zero where a mask drops the token, weighted by the rollout correction."""
    surrogate = parts.surrogate(terms, settings)
    if terms.correction is not None and not parts.weighs_correction:
        surrogate = surrogate * terms.correction
    keep = torch.ones_like(terms.logps, dtype=torch.bool)
    if totals.entropy_threshold is not None:
        keep = keep & high_entropy(terms.entropies, totals.entropy_threshold)
    if settings.off_policy_mask_threshold is not None:
        # With a correction the engine's own numbers show both drifts, that of the weights and that of the engine.
        sampled = terms.old if settings.correction is None else terms.behaviour
        keep = keep & near_policy(
            terms.logps, sampled, terms.advantages, terms.sequences, threshold=settings.off_policy_mask_threshold
        )
    return surrogate.masked_fill(~keep, 0.0)


def _mean_entropy(terms: LossTerms, totals: StepTotals) -> Tensor:
    """This micro-batch's share of the mean entropy over the tokens of the policy term's entropy mask."""
    entropies = terms.entropies
    if totals.entropy_threshold is not None:
        entropies = entropies.masked_fill(~high_entropy(entropies, totals.entropy_threshold), 0.0)
    return entropies.sum() / max(totals.entropy_tokens, 1.0)
