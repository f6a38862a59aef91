"""The objective's constants, under the names they have in recipes."""

from dataclasses import dataclass
from enum import StrEnum

from grpo_cli.objective.correction import CorrectionSettings
from grpo_cli.objective.ratio import RatioLevel


class LossType(StrEnum):
    """The objectives; `catalog` says what each is made of."""

    GRPO = "grpo"
    """Clipped ratio, mean over each completion's tokens."""
    BNPO = "bnpo"
    """Clipped ratio, mean over the tokens of a process."""
    DR_GRPO = "dr_grpo"
    """Clipped ratio, sum over tokens by a constant."""
    DAPO = "dapo"
    """Clipped ratio, mean over all tokens of the step."""
    CISPO = "cispo"
    """Clipped weight on the log-probability, mean over all tokens."""
    SAPO = "sapo"
    """Smooth gate, mean over each completion's tokens."""
    LUSPO = "luspo"
    """Clipped sequence ratio, weighted by length."""
    VESPO = "vespo"
    """Gamma weight of the whole sequence on the log-probability, mean over all tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveSettings:
    """What a loss depends on besides its tensors.

    Attributes:
        loss_type: Which objective.
        importance_sampling_level: A ratio per token or per completion.
        epsilon: Lower clip range.
        epsilon_high: Upper clip range; for cispo the ceiling of the ratio itself.
        delta: Bound of the unclipped branch; None for none.
        beta: KL coefficient; 0 needs no reference.
        use_bias_correction_kl: Multiply the KL estimate by the importance ratio.
        top_entropy_quantile: Share of tokens in the policy term, those of highest entropy; below 1 it needs
            `StepTotals.entropy_threshold`.
        entropy_coef: Weight of the mean-entropy bonus.
        off_policy_mask_threshold: Largest mean drift of a completion with negative advantage; None keeps all.
        sapo_temperature_pos, sapo_temperature_neg: Gate temperatures of sapo.
        vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: Exponents and decays of vespo.
        router_aux_loss_coef: Weight of the load-balancing loss of a mixture of experts.
        max_completion_length: The constant of dr_grpo.
        correction: Rollout correction; None for none.
    """

    loss_type: LossType
    importance_sampling_level: RatioLevel = RatioLevel.TOKEN
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = False
    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0
    off_policy_mask_threshold: float | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    router_aux_loss_coef: float = 0.0
    max_completion_length: int
    correction: CorrectionSettings | None = None
