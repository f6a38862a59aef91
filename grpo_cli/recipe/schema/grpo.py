"""`grpo:` advantages and objective."""

from dataclasses import dataclass
from typing import Literal

from grpo_cli.recipe.schema.option import option

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]


@dataclass(kw_only=True)
class GrpoSection:
    """Group size, loss and its constants."""

    num_generations: int = option(
        8, minimum=2, help="Completions per prompt (G). Advantages compare them with each other."
    )
    loss_type: LossType = option("dapo", help="Objective; see the table of losses.")
    importance_sampling_level: Literal["token", "sequence"] = option(
        "token", help="Ratio per token, or one per completion (GSPO)."
    )
    epsilon: float = option(0.2, above=0, help="Lower clip range: the ratio may fall to 1 - epsilon.")
    epsilon_high: float | None = option(
        None,
        above=0,
        help="Upper clip range, 1 + epsilon_high; epsilon if left out. For cispo it is the ceiling of the ratio itself.",
    )
    delta: float | None = option(
        None, above=1, help="Upper bound of the ratio when the advantage is negative (two-sided clip)."
    )
    beta: float = option(0.0, minimum=0, help="KL coefficient. 0 loads no reference model.")
    use_bias_correction_kl: bool = option(False, help="Multiply the KL estimate by the importance ratio.")
    num_iterations: int = option(1, minimum=1, help="Passes over each batch of completions (mu).")
    steps_per_generation: int = option(1, minimum=1, help="Optimizer steps that share one generation.")
    scale_rewards: Literal["group", "batch", "none"] = option(
        "group", help="Divide advantages by the standard deviation of the group, of the whole batch, or not at all."
    )
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = option(
        "sum_then_normalize",
        help="Weight and sum the rewards before normalising, or normalise each reward first (GDPO).",
    )
    mask_truncated_completions: bool = option(
        False, help="Leave completions that hit the length limit out of the loss."
    )
    top_entropy_quantile: float = option(
        1.0, above=0, maximum=1, help="Take the policy term only on this fraction of tokens, those of highest entropy."
    )
    entropy_coef: float = option(0.0, minimum=0, help="Weight of the mean-entropy bonus.")
    router_aux_loss_coef: float | None = option(
        None,
        minimum=0,
        help="Weight of the load-balancing loss of a mixture of experts; left out: what the model's configuration says.",
    )
    off_policy_mask_threshold: float | None = option(
        None, above=0, help="Drop completions with negative advantage that drifted further than this mean log-ratio."
    )
    sapo_temperature_pos: float = option(1.0, above=0, help="sapo: gate temperature for positive advantages.")
    sapo_temperature_neg: float = option(1.05, above=0, help="sapo: gate temperature for other advantages.")
    vespo_k_pos: float = option(2.0, minimum=0, help="vespo: exponent k for non-negative advantages.")
    vespo_lambda_pos: float = option(3.0, minimum=0, help="vespo: decay lambda for non-negative advantages.")
    vespo_k_neg: float = option(3.0, minimum=0, help="vespo: exponent k for negative advantages.")
    vespo_lambda_neg: float = option(2.0, minimum=0, help="vespo: decay lambda for negative advantages.")
    sync_ref_model: bool = option(False, help="Move the reference towards the policy from time to time.")
    ref_model_mixup_alpha: float = option(
        0.6,
        above=0,
        maximum=1,
        help="Share of the policy in the mix: reference = alpha * policy + (1 - alpha) * reference.",
    )
    ref_model_sync_steps: int = option(512, minimum=1, help="Steps between two mixes.")
