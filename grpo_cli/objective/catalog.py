"""The objectives as a table: `loss_type` -> what it is made of. A new objective is a new row."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from grpo_cli.objective.aggregate import (
    Aggregate,
    mean_of_sequence_means,
    mean_of_sequence_sums,
    mean_over_local_tokens,
    mean_over_tokens,
    sum_over_constant_length,
)
from grpo_cli.objective.measures import Measures, cispo_measures, clip_measures, vespo_measures, vespo_weight
from grpo_cli.objective.ratio import RatioLevel
from grpo_cli.objective.settings import LossType, ObjectiveSettings
from grpo_cli.objective.surrogate import cispo_surrogate, clipped_surrogate, sapo_surrogate, vespo_surrogate
from grpo_cli.objective.terms import LossTerms

__all__ = ["CATALOG", "LossRow", "LossType", "Requirement", "row"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Requirement:
    """What an objective demands of the other settings.

    Attributes:
        text: The demand, to complete "luspo needs ...".
        holds: Whether settings meet it.
    """

    text: str
    holds: Callable[[ObjectiveSettings], bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossRow:
    """The parts of an objective.

    Attributes:
        surrogate: Policy term per token [K].
        aggregate: How tokens become a scalar.
        measures: What it reports besides what all objectives do.
        requirements: What it demands of the other settings.
        weighs_correction: True if the surrogate takes in the rollout correction itself; else it multiplies the surrogate.
    """

    surrogate: Callable[[LossTerms, ObjectiveSettings], Tensor]
    aggregate: Aggregate
    measures: Callable[[LossTerms, ObjectiveSettings], Measures]
    requirements: tuple[Requirement, ...] = ()
    weighs_correction: bool = False


def row(settings: ObjectiveSettings) -> LossRow:
    """Look up the row of `settings.loss_type`.

    Raises:
        ValueError: If the settings do not meet its requirements.
    """
    found = CATALOG[settings.loss_type]
    unmet = [requirement.text for requirement in found.requirements if not requirement.holds(settings)]
    if unmet:
        raise ValueError(f"loss_type {settings.loss_type} needs {' and '.join(unmet)}")
    return found


def _clipped(terms: LossTerms, settings: ObjectiveSettings) -> Tensor:
    return clipped_surrogate(
        terms.ratio,
        terms.advantages,
        epsilon=settings.epsilon,
        epsilon_high=settings.epsilon_high,
        delta=settings.delta,
    )


def _cispo(terms: LossTerms, settings: ObjectiveSettings) -> Tensor:
    return cispo_surrogate(terms.ratio, terms.advantages, terms.logps, ceiling=settings.epsilon_high)


def _sapo(terms: LossTerms, settings: ObjectiveSettings) -> Tensor:
    return sapo_surrogate(
        terms.ratio,
        terms.advantages,
        temperature_pos=settings.sapo_temperature_pos,
        temperature_neg=settings.sapo_temperature_neg,
    )


def _vespo(terms: LossTerms, settings: ObjectiveSettings) -> Tensor:
    return vespo_surrogate(vespo_weight(terms, settings), terms.advantages, terms.logps)


def _no_measures(_terms: LossTerms, _settings: ObjectiveSettings) -> Measures:
    return {}


_SEQUENCE_RATIOS = Requirement(
    text="importance_sampling_level sequence",
    holds=lambda settings: settings.importance_sampling_level == RatioLevel.SEQUENCE,
)
_TOKEN_CORRECTION = Requirement(
    text="token level in its rollout correction",  # it multiplies token ratios to the sequence's itself
    holds=lambda settings: settings.correction is None or settings.correction.level == RatioLevel.TOKEN,
)

CATALOG: Mapping[LossType, LossRow] = {
    LossType.GRPO: LossRow(surrogate=_clipped, aggregate=mean_of_sequence_means, measures=clip_measures),
    LossType.BNPO: LossRow(surrogate=_clipped, aggregate=mean_over_local_tokens, measures=clip_measures),
    LossType.DR_GRPO: LossRow(surrogate=_clipped, aggregate=sum_over_constant_length, measures=clip_measures),
    LossType.DAPO: LossRow(surrogate=_clipped, aggregate=mean_over_tokens, measures=clip_measures),
    LossType.CISPO: LossRow(surrogate=_cispo, aggregate=mean_over_tokens, measures=cispo_measures),
    LossType.SAPO: LossRow(surrogate=_sapo, aggregate=mean_of_sequence_means, measures=_no_measures),
    LossType.LUSPO: LossRow(
        surrogate=_clipped,
        aggregate=mean_of_sequence_sums,
        measures=clip_measures,
        requirements=(_SEQUENCE_RATIOS,),
    ),
    LossType.VESPO: LossRow(
        surrogate=_vespo,
        aggregate=mean_over_tokens,
        measures=vespo_measures,
        requirements=(_TOKEN_CORRECTION,),
        weighs_correction=True,
    ),
}
