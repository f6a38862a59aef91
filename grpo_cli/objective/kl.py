"""The KL penalty towards the reference policy."""

from torch import Tensor

from grpo_cli.objective.ratio import MAX_LOG_RATIO

MIN_LOG_RATIO = -1e4
"""Only -inf lies below it: a token that is impossible for the reference gets a large finite penalty instead of an infinite one."""


def k3_kl(logps: Tensor, reference: Tensor, *, ratio: Tensor | None = None) -> Tensor:
    """Estimate KL(pi || pi_ref) per token by k3 = exp(x) - x - 1 with x = log pi_ref - log pi.

    Non-negative and unbiased under samples of pi: Schulman 2020, "Approximating KL divergence"; GRPO, Shao et al. 2024,
    arXiv:2402.03300, eq. 4.

    Overflow: x is kept within [-1e4, 20]. Beyond, the estimate is constant and has no gradient. The upper end is reached where the
    policy gives a token e^20 times less than the reference does, which a sample of the policy practically never is; the lower
    end keeps the whole linear branch, where a policy that moved far away is pulled back.

    Args:
        logps: float [K], log pi, differentiable.
        reference: float [K], log pi_ref.
        ratio: float [K], pi / pi_old. Given, the estimate is multiplied with it, gradient included, which makes the gradient unbiased
            for tokens sampled from pi_old: DeepSeek-V3.2, 2025, arXiv:2512.02556.

    Returns:
        float [K], differentiable.
    """
    log_ratio = (reference - logps).clamp(min=MIN_LOG_RATIO, max=MAX_LOG_RATIO)
    estimate = log_ratio.expm1() - log_ratio
    return estimate if ratio is None else estimate * ratio
