"""What every part of the objective works on: the K tokens of a micro-batch that take part in the loss.

Tokens outside the loss mask are left behind here, once. So nothing later multiplies by a mask, and nothing in a masked token, NaN
included, can reach the loss or its gradient.
"""

from dataclasses import dataclass

from torch import Tensor

from grpo_cli.objective.correction import correction_weight
from grpo_cli.objective.ratio import RatioLevel, importance_ratio, rollout_ratio
from grpo_cli.objective.sequences import Sequences
from grpo_cli.objective.settings import ObjectiveSettings
from grpo_cli.types import TokenBatch, TokenStats


@dataclass(frozen=True, kw_only=True, slots=True)
class LossTerms:
    """Loss tokens; float [K] in the precision of the current log-probabilities.

    Attributes:
        sequences: Where the tokens belong.
        logps: Current log-probabilities, differentiable.
        old: Log-probabilities under the weights that sampled.
        behaviour: Log-probabilities by the rollout engine.
        reference: Log-probabilities under the reference; None without a KL term.
        entropies: Current entropies.
        advantages: The completion's advantage, for each token.
        log_ratio: logps - old, per token.
        ratio: Importance ratio at the level of the settings, differentiable.
        rollout_ratio: exp(old - behaviour), unbounded, at the level of the correction (token without one).
        correction: Its bounded form; None without a correction.
    """

    sequences: Sequences
    logps: Tensor
    old: Tensor
    behaviour: Tensor
    reference: Tensor | None
    entropies: Tensor
    advantages: Tensor
    log_ratio: Tensor
    ratio: Tensor
    rollout_ratio: Tensor
    correction: Tensor | None


def loss_terms(stats: TokenStats, tokens: TokenBatch, settings: ObjectiveSettings) -> LossTerms:
    """Pick the loss tokens of a micro-batch and form their ratios.

    Args:
        stats: From the policy's forward.
        tokens: The micro-batch's tokens.
        settings: Levels and bounds of the ratios, and whether there is a KL term.

    Raises:
        ValueError: If `beta` is not 0 and the batch has no reference log-probabilities.
    """
    if settings.beta != 0.0 and tokens.ref_logps is None:
        raise ValueError(f"beta is {settings.beta:g}, but the batch has no reference log-probabilities")

    places = tokens.loss_mask.nonzero()[:, 0]  # once, for the host waits for a GPU here

    def pick(values: Tensor) -> Tensor:
        return values.index_select(0, places).to(stats.logps.dtype)

    sequences = Sequences.count(
        tokens.sequence.index_select(0, places), number=tokens.advantages.numel(), dtype=stats.logps.dtype
    )
    logps, behaviour = pick(stats.logps), pick(tokens.behaviour_logps)
    old = logps.detach() if tokens.old_logps is None else pick(tokens.old_logps)
    log_ratio = logps - old
    correction = settings.correction
    rollout = rollout_ratio(old, behaviour, sequences, correction.level if correction else RatioLevel.TOKEN)
    return LossTerms(
        sequences=sequences,
        logps=logps,
        old=old,
        behaviour=behaviour,
        reference=None if settings.beta == 0.0 or tokens.ref_logps is None else pick(tokens.ref_logps),
        entropies=pick(stats.entropies),
        advantages=sequences.spread(tokens.advantages.to(logps.dtype)),
        log_ratio=log_ratio,
        ratio=importance_ratio(log_ratio, sequences, settings.importance_sampling_level),
        rollout_ratio=rollout,
        correction=correction_weight(rollout, correction) if correction else None,
    )
