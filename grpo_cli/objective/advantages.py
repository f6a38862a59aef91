"""Advantages: how much better a completion is than the others of its group.

Rewards are [G, F] per group, NaN where a function did not apply. A completion that no function scored has advantage 0 and is left
out of every mean and standard deviation. Standard deviations are unbiased (n - 1); over fewer than two values they are 0 here.
Computed in float64, so that an advantage does not depend on the order of additions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from grpo_cli.metrics import Mean, Metrics, MetricValue

EPSILON = 1e-4
"""Added to a standard deviation before dividing by it."""

_ROUNDING = 4 * torch.finfo(torch.float32).eps
"""Rewards arrive as float32: values whose spread is below this share of their size are equal."""


class ScaleRewards(StrEnum):
    """What advantages are divided by."""

    GROUP = "group"
    """The standard deviation of the group's rewards (GRPO, Shao et al. 2024, arXiv:2402.03300)."""
    BATCH = "batch"
    """That of all rewards of the step (Liu et al. 2025, arXiv:2508.08221)."""
    NONE = "none"
    """Nothing (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783)."""


class MultiObjectiveAggregation(StrEnum):
    """How several reward functions become one advantage."""

    SUM_THEN_NORMALIZE = "sum_then_normalize"
    """Weight and sum the rewards, then compare completions."""
    NORMALIZE_THEN_SUM = "normalize_then_sum"
    """Normalise each function within the group, weight and sum, then divide by the step's standard deviation, whatever
    `scale_rewards` says (GDPO, Liu et al. 2026, arXiv:2601.05242)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageSettings:
    """How rewards become advantages.

    Attributes:
        weights: One weight per reward function (F).
        scale_rewards: What to divide by.
        multi_objective_aggregation: In which order functions are summed and normalised.
    """

    weights: tuple[float, ...]
    scale_rewards: ScaleRewards = ScaleRewards.GROUP
    multi_objective_aggregation: MultiObjectiveAggregation = MultiObjectiveAggregation.SUM_THEN_NORMALIZE


Total = Callable[[Tensor], Tensor]
"""Adds to sums over some groups, a float64 tensor, those over all other groups of the step."""


def _alone(sums: Tensor) -> Tensor:
    """Have no other groups than these."""
    return sums


def advantages(rewards: Sequence[Tensor], settings: AdvantageSettings, total: Total = _alone) -> tuple[Tensor, ...]:
    """Advantages of a step's groups, or of some of them.

    A group whose rewards are all equal (to float32 rounding) has advantages of exactly 0.

    Args:
        rewards: One float [G, F] per group; G may differ.
        settings: Weights and normalisation.
        total: Knows the other groups, for the step's standard deviation; left out: there are none.

    Returns:
        One float32 [G] per group.

    Raises:
        ValueError: If a group does not have one reward per weight.
    """
    _check_shapes(rewards, settings)
    normalize_first = settings.multi_objective_aggregation == MultiObjectiveAggregation.NORMALIZE_THEN_SUM
    scores = [_normalized(group.double()) if normalize_first else group.double() for group in rewards]
    # normalize_then_sum: the sum of normalised rewards has mean 0 in each group already, so centring it is only a guard.
    sums = _weighted_sums(scores, settings.weights)
    deviations = [_deviation(values, size) for values, size in sums]
    if normalize_first or settings.scale_rewards == ScaleRewards.BATCH:
        (deviation_of_all,), _ = _std_of_all(_joined([values for values, _ in sums])[:, None], total)
        scale = deviation_of_all + EPSILON
        scaled = [deviation / scale for deviation in deviations]
    elif settings.scale_rewards == ScaleRewards.GROUP:
        scaled = [deviation / (_std(values) + EPSILON) for deviation, (values, _) in zip(deviations, sums, strict=True)]
    else:
        scaled = deviations
    return tuple(values.nan_to_num(nan=0.0).float() for values in scaled)


def reward_metrics(
    rewards: Sequence[Tensor], names: Sequence[str], settings: AdvantageSettings, total: Total = _alone
) -> Metrics:
    """Statistics of a step's rewards before any normalisation; those of some groups can be merged with those of the others.

    `reward` is the weighted sum over functions. Standard deviations are over all completions of the step. `frac_reward_zero_std` is
    the share of groups whose `reward` is the same for all scored completions: such a group teaches nothing. One scored
    completion is such a group; a group without any is not counted.

    Args:
        rewards: One float [G, F] per group.
        names: One name per reward function (F).
        settings: Weights.
        total: Knows the other groups, for the standard deviations; left out: there are none.

    Returns:
        reward/{name}/mean, reward/{name}/std, reward, reward_std, frac_reward_zero_std. A standard deviation is one number per call:
        merging averages it.

    Raises:
        ValueError: If a group does not have one reward per name and weight.
    """
    _check_shapes(rewards, settings)
    columns = torch.cat([torch.empty(0, len(settings.weights)), *rewards]).double()
    sums = _weighted_sums([group.double() for group in rewards], settings.weights)
    weighted = _joined([values for values, _ in sums])
    stds, counts = _std_of_all(torch.cat([columns, weighted[:, None]], dim=1), total)
    of_all = [
        Mean(std, 1.0) if count > 1 else Mean(0.0, 0.0)
        for std, count in zip(stds.tolist(), counts.tolist(), strict=True)
    ]
    metrics: dict[str, MetricValue] = {}
    for name, column, std in zip(names, columns.unbind(dim=1), of_all[:-1], strict=True):
        metrics[f"reward/{name}/mean"] = _mean_metric(column)
        metrics[f"reward/{name}/std"] = std
    flat = [
        _is_flat(scored, size) for scored, size in ((_scored(values), size) for values, size in sums) if scored.numel()
    ]
    metrics["reward"] = _mean_metric(weighted)
    metrics["reward_std"] = of_all[-1]
    metrics["frac_reward_zero_std"] = Mean(float(sum(flat)), float(len(flat)))
    return metrics


def _check_shapes(rewards: Sequence[Tensor], settings: AdvantageSettings) -> None:
    for group in rewards:
        if group.dim() != 2 or group.shape[1] != len(settings.weights):
            raise ValueError(f"rewards of shape {tuple(group.shape)} do not fit {len(settings.weights)} reward weights")


def _joined(values: Sequence[Tensor]) -> Tensor:
    """Put float64 [G] of groups, of which there may be none, behind each other."""
    return torch.cat([torch.empty(0, dtype=torch.float64), *values])


def _normalized(group: Tensor) -> Tensor:
    """Normalise each column of [G, F] over the completions it applies to."""
    columns = [
        _deviation(column, column.abs().nan_to_num(nan=0.0).max()) / (_std(column) + EPSILON) for column in group.T
    ]
    return torch.stack(columns, dim=1)


def _weighted_sums(groups: Sequence[Tensor], weights: tuple[float, ...]) -> list[tuple[Tensor, Tensor]]:
    """Sum each [G, F] to [G], NaN where nothing applies; and the size of its largest sum without cancellation, a scalar.

    All groups of the step in one go: there are thousands of them with many processes.
    """
    rewards = torch.cat([torch.empty(0, len(weights), dtype=torch.float64), *groups])
    weighted = rewards * torch.tensor(weights, dtype=torch.float64)
    totals = weighted.nansum(dim=1).masked_fill(rewards.isnan().all(dim=1), torch.nan)
    sizes = weighted.abs().nansum(dim=1)
    lengths = [len(group) for group in groups]
    return [
        (total, size.max())
        for total, size in zip(torch.split(totals, lengths), torch.split(sizes, lengths), strict=True)
    ]


def _deviation(values: Tensor, size: Tensor) -> Tensor:
    """Distance of values [G] from their mean, NaN kept; exactly 0 if all are equal to rounding of numbers of the given size."""
    scored = _scored(values)
    if scored.numel() == 0 or _is_flat(scored, size):
        return torch.where(values.isnan(), values, torch.zeros_like(values))
    return values - scored.mean()


def _is_flat(scored: Tensor, size: Tensor) -> bool:
    """Tell whether values are all equal to rounding of numbers of the given size."""
    return bool(scored.max() - scored.min() <= _ROUNDING * size)


def _scored(values: Tensor) -> Tensor:
    return values[~values.isnan()]


def _std(values: Tensor) -> Tensor:
    """Unbiased standard deviation over what is scored, a scalar; 0 over fewer than two values."""
    scored = _scored(values)
    return scored.std() if scored.numel() > 1 else values.new_zeros(())


def _std_of_all(columns: Tensor, total: Total) -> tuple[Tensor, Tensor]:
    """The same of each column of [N, C], over the rows of all processes, which tell each other sums alone.

    In two passes, first the means (Chan, Golub and LeVeque 1983, doi:10.1080/00031305.1983.10483115, equation 1.5).

    Returns:
        float64 [C], and how many values it is over: float64 [C].
    """
    is_scored = ~columns.isnan()
    values = columns.masked_fill(~is_scored, 0.0)
    counts, sums = total(torch.stack([is_scored.sum(dim=0).double(), values.sum(dim=0)]))
    deviations = (values - sums / counts.clamp(min=1)).masked_fill(~is_scored, 0.0)
    squares = total(deviations.square().sum(dim=0))
    return (squares / (counts - 1).clamp(min=1)).sqrt(), counts


def _mean_metric(values: Tensor) -> Mean:
    scored = _scored(values)
    return Mean(scored.sum().item(), float(scored.numel()))
