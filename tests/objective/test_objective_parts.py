"""The objective's parts one by one, against definitions written as plain Python."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from objective.objective_batches import correct, make_batch, make_settings, make_totals, run

from grpo_cli.metrics import results
from grpo_cli.objective.correction import correction_weight
from grpo_cli.objective.kl import k3_kl
from grpo_cli.objective.masks import entropy_threshold, high_entropy, near_policy
from grpo_cli.objective.ratio import RatioLevel, importance_ratio, rollout_ratio
from grpo_cli.objective.sequences import Sequences
from grpo_cli.objective.settings import LossType
from grpo_cli.objective.surrogate import clipped_surrogate, gamma_weight, sapo_surrogate


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def sequences(*index: int, number: int) -> Sequences:
    return Sequences.count(torch.tensor(index), number=number, dtype=torch.float64)


def test_sequence_sums_and_means_leave_empty_sequences_at_zero() -> None:
    three = sequences(2, 0, 2, number=3)
    assert three.sum(tensor(1, 2, 5)).tolist() == [2, 0, 6]
    assert three.mean(tensor(1, 2, 5)).tolist() == [2, 0, 3]
    assert three.active.tolist() == [True, False, True]
    assert three.spread(tensor(7, 8, 9)).tolist() == [9, 7, 9]


def test_sequence_ratio_is_the_geometric_mean_of_token_ratios() -> None:
    log_ratio = tensor(0.1, 0.5, -0.2)
    token = importance_ratio(log_ratio, sequences(0, 0, 1, number=2), RatioLevel.TOKEN)
    sequence = importance_ratio(log_ratio, sequences(0, 0, 1, number=2), RatioLevel.SEQUENCE)
    assert token.tolist() == pytest.approx([math.exp(0.1), math.exp(0.5), math.exp(-0.2)])
    assert sequence.tolist() == pytest.approx([math.sqrt(math.exp(0.1) * math.exp(0.5))] * 2 + [math.exp(-0.2)])


def test_rollout_ratio_of_a_sequence_is_the_product_and_unknown_tokens_count_as_one() -> None:
    old, behaviour = tensor(-1.0, -2.0, -0.5), tensor(-1.2, math.nan, -0.4)
    token = rollout_ratio(old, behaviour, sequences(0, 0, 0, number=1), RatioLevel.TOKEN)
    sequence = rollout_ratio(old, behaviour, sequences(0, 0, 0, number=1), RatioLevel.SEQUENCE)
    assert token.tolist() == pytest.approx([math.exp(0.2), 1.0, math.exp(-0.1)])
    assert sequence.tolist() == pytest.approx([math.exp(0.1)] * 3)


@pytest.mark.parametrize(
    ("mode", "clip_min", "clip_max", "expected"),
    [
        ("truncate", 0.9, 1.1, [0.9, 1.0, 1.1]),
        ("truncate", None, 1.1, [0.1, 1.0, 1.1]),
        ("truncate", 0.9, None, [0.9, 1.0, 2.0]),
        ("mask", 0.9, 1.1, [0.0, 1.0, 0.0]),
        ("mask", None, 1.1, [0.1, 1.0, 0.0]),
        ("mask", 0.9, None, [0.0, 1.0, 2.0]),
    ],
)
def test_correction_moves_ratios_to_the_bound_or_drops_them(
    mode: str, clip_min: float | None, clip_max: float | None, expected: list[float]
) -> None:
    assert correction_weight(tensor(0.1, 1.0, 2.0), correct("token", mode, clip_min, clip_max)).tolist() == expected


@given(st.floats(-200, 19.9), st.floats(-30, 0))
def test_k3_is_its_formula_wherever_it_cannot_overflow(x: float, logp: float) -> None:
    logps = tensor(logp).requires_grad_()
    kl = k3_kl(logps, tensor(logp) + x)
    torch.autograd.backward(kl.sum())
    x = (tensor(logp) + x - logp).item()
    assert kl.item() == pytest.approx(math.exp(x) - x - 1, rel=1e-9, abs=1e-12)
    assert logps.grad is not None
    assert logps.grad.item() == pytest.approx(1 - math.exp(x), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reference", [1e30, 1e4, 100.0, -1e30, -math.inf])
def test_k3_of_distant_policies_is_finite_with_a_finite_gradient(dtype: torch.dtype, reference: float) -> None:
    logps = torch.tensor([-1.0], dtype=dtype, requires_grad=True)
    kl = k3_kl(logps, torch.tensor([reference], dtype=dtype), ratio=logps.exp())
    torch.autograd.backward(kl.sum())
    assert kl.isfinite().all()
    assert kl.item() > 1e3
    assert logps.grad is not None
    assert logps.grad.isfinite().all()


@given(st.lists(st.floats(0, 10, width=32), min_size=1, max_size=40), st.floats(0.01, 1.0))
def test_entropy_threshold_is_the_quantile_of_the_counted_tokens(values: list[float], quantile: float) -> None:
    counted = tensor(*values)
    entropies, mask = torch.cat([counted, tensor(99, -99)]), torch.ones(len(values) + 2, dtype=torch.bool)
    mask[-2:] = False
    threshold = entropy_threshold(entropies, mask, quantile)
    assert threshold == pytest.approx(torch.quantile(counted, 1 - quantile).item(), rel=1e-9, abs=1e-12)
    assert high_entropy(counted, threshold).sum() >= 1


def test_entropy_threshold_keeps_the_token_it_falls_on_and_all_tokens_at_quantile_one() -> None:
    entropies, everything = torch.tensor([0.1, 0.2, 0.3]), torch.ones(3, dtype=torch.bool)
    assert high_entropy(entropies, entropy_threshold(entropies, everything, 0.5)).tolist() == [False, True, True]
    assert high_entropy(entropies, entropy_threshold(entropies, everything, 1.0)).all()
    assert entropy_threshold(entropies, ~everything, 0.5) == math.inf


class WithoutFloat64(torch.Tensor):
    """A tensor as on a device that has no float64 (MPS); on the CPU it is an ordinary one."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.double:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        outcome = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]  # torch gives it no types
        return outcome.as_subclass(torch.Tensor) if func is torch.Tensor.cpu else outcome


def test_entropy_threshold_needs_no_float64_of_the_device() -> None:
    entropies = torch.tensor([0.1, 0.2, 0.3]).as_subclass(WithoutFloat64)
    assert entropy_threshold(entropies, torch.ones(3, dtype=torch.bool), 0.5) == pytest.approx(0.2)


def test_off_policy_mask_drops_only_drifted_sequences_with_negative_advantage() -> None:
    """Mean drift is 0.3 in the first two sequences and 0.1 in the third; in the fourth one token is unknown and counts as 0."""
    two_each = sequences(0, 0, 1, 1, 2, 2, 3, 3, number=4)
    logps = torch.full((8,), -2.0, dtype=torch.float64)
    behaviour = logps + tensor(0.5, 0.1, 0.5, 0.1, 0.5, -0.3, 0.3, math.nan)
    advantages = tensor(-1, -1, 0, 0, -1, -1, -1, -1)
    keep = near_policy(logps, behaviour, advantages, two_each, threshold=0.2)
    assert keep.tolist() == [False, False, True, True, True, True, True, True]


@given(st.floats(0.2, 3), st.floats(-3, 3), st.sampled_from([None, 1.1, 1.5]))
def test_clipped_surrogate_is_the_pessimistic_of_both_branches(
    ratio: float, advantage: float, delta: float | None
) -> None:
    value = clipped_surrogate(tensor(ratio), tensor(advantage), epsilon=0.2, epsilon_high=0.3, delta=delta)
    unclipped = min(ratio, delta) if delta else ratio
    expected = -min(unclipped * advantage, min(max(ratio, 0.8), 1.3) * advantage)
    assert value.item() == pytest.approx(expected)


@given(st.floats(0.2, 3), st.floats(-3, 3))
def test_sapo_gate_is_a_sigmoid_with_a_temperature_by_sign(ratio: float, advantage: float) -> None:
    tau = 1.0 if advantage > 0 else 1.05
    value = sapo_surrogate(tensor(ratio), tensor(advantage), temperature_pos=1.0, temperature_neg=1.05)
    assert value.item() == pytest.approx(-4 / tau / (1 + math.exp(-tau * (ratio - 1))) * advantage)


@given(st.floats(-1, 1), st.floats(-1, 1), st.sampled_from([1.0, 0.0, -1.0]), st.floats(0.5, 1.5))
def test_gamma_weight_is_one_on_policy_and_its_formula_elsewhere(
    first: float, second: float, advantage: float, correction: float
) -> None:
    pair, signs = sequences(0, 0, number=1), tensor(advantage, advantage)

    def phi(log_ratio: torch.Tensor, weights: torch.Tensor | None) -> list[float]:
        weight = gamma_weight(
            log_ratio, signs, pair, correction=weights, k_pos=2.0, lambda_pos=3.0, k_neg=3.0, lambda_neg=2.0
        )
        return [float(value) for value in weight]

    k, decay = (2, 3) if advantage >= 0 else (3, 2)
    w = math.exp(first + second) * correction
    assert phi(tensor(0, 0), None) == [1.0, 1.0]
    expected = w**k * math.exp(decay * (1 - w))
    assert phi(tensor(first, second), tensor(correction, 1.0)) == pytest.approx([expected] * 2)


def test_sampling_metrics_are_of_the_raw_ratio_and_of_scored_tokens() -> None:
    batch = make_batch([2, 2], seed=0)
    old = tensor(-1.0, -1.0, -1.0, -1.0)
    behaviour = old - tensor(0.5, -0.1, 0.2, math.nan)
    batch = replace(batch, tokens=replace(batch.tokens, old_logps=old, behaviour_logps=behaviour))
    settings = make_settings(LossType.DAPO, correction=correct("token", "truncate", 0.95, 1.1))
    metrics = results(run(batch, make_totals([batch], settings), settings).output.metrics)
    ratios = [math.exp(0.5), math.exp(-0.1), math.exp(0.2), 1.0]
    assert metrics["sampling/logp_difference/mean"] == pytest.approx((0.5 + 0.1 + 0.2) / 3)
    assert metrics["sampling/logp_difference/max"] == pytest.approx(0.5)
    assert metrics["sampling/importance_ratio/min"] == pytest.approx(min(ratios))
    assert metrics["sampling/importance_ratio/mean"] == pytest.approx(sum(ratios) / 4)
    assert metrics["sampling/importance_ratio/max"] == pytest.approx(max(ratios))
    assert metrics["sampling/importance_ratio/clipped_fraction"] == 3 / 4
    assert metrics["sampling/importance_ratio/clipped_mean"] == pytest.approx((1.1 + 0.95 + 1.1 + 1.0) / 4)
    assert metrics["sampling/importance_ratio/masked_sequences"] == 0

    settings = replace(settings, correction=correct("sequence", "mask", 0.95, 1.3))
    metrics = results(run(batch, make_totals([batch], settings), settings).output.metrics)
    assert metrics["sampling/importance_ratio/mean"] == pytest.approx((math.exp(0.4) + math.exp(0.2)) / 2)
    assert metrics["sampling/importance_ratio/clipped_fraction"] == 1 / 2
    assert metrics["sampling/importance_ratio/clipped_mean"] == pytest.approx((0 + math.exp(0.2)) / 2)
    assert metrics["sampling/importance_ratio/masked_sequences"] == 1 / 2

    settings = replace(settings, correction=correct("token", "mask", 0.95, 1.1))
    metrics = results(run(batch, make_totals([batch], settings), settings).output.metrics)
    assert metrics["sampling/importance_ratio/clipped_mean"] == pytest.approx(1 / 4)
    assert metrics["sampling/importance_ratio/masked_sequences"] == 1 / 2, "one completion keeps a token"
