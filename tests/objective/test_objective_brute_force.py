"""The whole loss and its clip metrics against loops over plain floats, written from the definitions."""

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st
from objective.objective_batches import ALLOWED, Batch, correct, make_batch, make_settings, make_totals, run

from grpo_cli.metrics import results
from grpo_cli.objective.ratio import RatioLevel
from grpo_cli.objective.settings import LossType, ObjectiveSettings
from grpo_cli.types import StepTotals

EVERY_OBJECTIVE = pytest.mark.parametrize(("loss_type", "level"), ALLOWED, ids=[f"{a}-{b}" for a, b in ALLOWED])
Rows = list[dict[str, list[float]]]


def rows_of(batch: Batch) -> Rows:
    """Loss tokens by sequence; a masked sequence has empty lists."""
    tokens = batch.tokens
    assert tokens.ref_logps is not None
    columns = {
        "logp": batch.logps,
        "old": batch.logps if tokens.old_logps is None else tokens.old_logps,
        "ref": tokens.ref_logps,
        "behaviour": tokens.behaviour_logps,
        "entropy": batch.entropies,
    }
    number = tokens.advantages.numel()
    picks = [(tokens.sequence == i) & tokens.loss_mask for i in range(number)]
    return [
        {name: [float(value) for value in column[pick]] for name, column in columns.items()}
        | {"advantage": [float(tokens.advantages[i])]}
        for i, pick in enumerate(picks)
    ]


def ratios_of(row: dict[str, list[float]], level: RatioLevel) -> list[float]:
    logs = [logp - old for logp, old in zip(row["logp"], row["old"], strict=True)]
    if level == RatioLevel.SEQUENCE and logs:
        logs = [sum(logs) / len(logs)] * len(logs)
    return [math.exp(value) for value in logs]


def corrections_of(row: dict[str, list[float]], settings: ObjectiveSettings) -> list[float]:
    correction = settings.correction
    logs = [old - behaviour for old, behaviour in zip(row["old"], row["behaviour"], strict=True)]
    if correction is None:
        return [1.0] * len(logs)
    if correction.level == "sequence":
        logs = [sum(logs)] * len(logs)
    low, high = correction.clip_min or 0.0, correction.clip_max or math.inf
    if correction.mode == "mask":
        return [math.exp(value) if low <= math.exp(value) <= high else 0.0 for value in logs]
    return [min(max(math.exp(value), low), high) for value in logs]


def surrogate(ratio: float, advantage: float, logp: float, phi: float, s: ObjectiveSettings) -> float:
    match s.loss_type:
        case LossType.CISPO:
            return -min(ratio, s.epsilon_high) * advantage * logp
        case LossType.SAPO:
            tau = s.sapo_temperature_pos if advantage > 0 else s.sapo_temperature_neg
            return -4 / tau / (1 + math.exp(-tau * (ratio - 1))) * advantage
        case LossType.VESPO:
            return -phi * advantage * logp
        case _:
            clipped = min(max(ratio, 1 - s.epsilon), 1 + s.epsilon_high)
            return -min(min(ratio, s.delta or math.inf) * advantage, clipped * advantage)


def phi_of(row: dict[str, list[float]], corrections: list[float], s: ObjectiveSettings) -> float:
    advantage = row["advantage"][0]
    k, decay = (s.vespo_k_pos, s.vespo_lambda_pos) if advantage >= 0 else (s.vespo_k_neg, s.vespo_lambda_neg)
    log_w = sum(math.log(max(value, 1e-8)) for value in corrections)
    log_w += sum(logp - old for logp, old in zip(row["logp"], row["old"], strict=True))
    w = min(max(math.exp(log_w), 1e-8), math.exp(20))
    return math.pow(w, k) * math.exp(decay * (1 - w))


def token_losses(row: dict[str, list[float]], totals: StepTotals, s: ObjectiveSettings) -> list[float]:
    advantage, length = row["advantage"][0], len(row["logp"])
    corrections = corrections_of(row, s)
    phi = phi_of(row, corrections, s)
    sampled = row["old"] if s.correction is None else row["behaviour"]
    drift = sum(b - logp for b, logp in zip(sampled, row["logp"], strict=True)) / max(length, 1)
    dropped = s.off_policy_mask_threshold is not None and advantage < 0 and drift > s.off_policy_mask_threshold
    losses = []
    for t, ratio in enumerate(ratios_of(row, s.importance_sampling_level)):
        value = surrogate(ratio, advantage, row["logp"][t], phi, s)
        if s.loss_type != LossType.VESPO:
            value *= corrections[t]
        if dropped or row["entropy"][t] < (totals.entropy_threshold or 0.0):
            value = 0.0
        x = row["ref"][t] - row["logp"][t]
        kl = math.exp(x) - x - 1
        losses.append(value + s.beta * kl * (ratio if s.use_bias_correction_kl else 1))
    return losses


def brute_force(rows: Rows, totals: StepTotals, s: ObjectiveSettings) -> tuple[float, float]:
    """The policy loss, and the loss with the entropy bonus."""
    losses = [token_losses(row, totals, s) for row in rows]
    total = sum(map(sum, losses))
    policy = {
        LossType.GRPO: sum(sum(row) / max(len(row), 1) for row in losses) / totals.sequences,
        LossType.SAPO: sum(sum(row) / max(len(row), 1) for row in losses) / totals.sequences,
        LossType.BNPO: total / totals.local_tokens / totals.processes,
        LossType.DR_GRPO: total / (totals.sequences * s.max_completion_length),
        LossType.LUSPO: total / totals.sequences,
    }.get(s.loss_type, total / totals.completion_tokens)
    effective = [value for row in rows for value in row["entropy"] if value >= (totals.entropy_threshold or 0.0)]
    return policy, policy - s.entropy_coef * sum(effective) / totals.entropy_tokens


@EVERY_OBJECTIVE
@limits(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_loss_agrees_with_brute_force(loss_type: LossType, level: RatioLevel, data: st.DataObject) -> None:
    """The totals are those of a larger step on two processes, all of them different numbers."""
    pick = data.draw
    masked = pick(st.lists(st.booleans(), min_size=4, max_size=4))
    batch = make_batch([3, 1, 4, 2], seed=pick(st.integers(0, 999)), masked=masked, with_old=pick(st.booleans()))
    if pick(st.booleans()):  # some advantages are exactly 0 then
        batch = replace(batch, tokens=replace(batch.tokens, advantages=batch.tokens.advantages.round()))
    levels = ["token"] if loss_type == LossType.VESPO else ["token", "sequence"]
    corrections = [None] + [correct(a, b, low) for a in levels for b in ("mask", "truncate") for low in (None, 0.9)]
    settings = make_settings(
        loss_type,
        level,
        beta=pick(st.sampled_from([0.0, 0.1])),
        delta=pick(st.sampled_from([None, 1.4])),
        use_bias_correction_kl=pick(st.booleans()),
        top_entropy_quantile=pick(st.sampled_from([1.0, 0.5])),
        entropy_coef=0.1,
        off_policy_mask_threshold=pick(st.sampled_from([None, 0.05])),
        correction=pick(st.sampled_from(corrections)),
    )
    threshold = 0.6 if settings.top_entropy_quantile < 1 else None
    totals = StepTotals(
        completion_tokens=71.0,
        sequences=17.0,
        local_tokens=37.0,
        processes=2,
        entropy_threshold=threshold,
        entropy_tokens=29.0,
    )
    output = run(batch, totals, settings).output
    policy, whole = brute_force(rows_of(batch), totals, settings)
    assert output.loss.item() == pytest.approx(whole, rel=1e-9, abs=1e-12)
    assert results(output.metrics)["policy_loss"] == pytest.approx(policy, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("level", RatioLevel)
@limits(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 999), masked=st.lists(st.booleans(), min_size=4, max_size=4))
def test_clip_metrics_leave_masked_completions_out(level: RatioLevel, seed: int, masked: list[bool]) -> None:
    batch = make_batch([3, 1, 4, 2], seed=seed, masked=masked)
    settings = make_settings(LossType.DAPO, level)
    low: list[list[float]] = []
    high: list[list[float]] = []
    for row in rows_of(batch):
        if not row["logp"]:
            continue
        ratios, advantage = ratios_of(row, level), row["advantage"][0]
        ratios = ratios[:1] if level == RatioLevel.SEQUENCE else ratios
        low.append([float(ratio < 0.8 and advantage < 0) for ratio in ratios])
        high.append([float(ratio > 1.25 and advantage > 0) for ratio in ratios])

    def mean(values: Iterable[float]) -> float:
        values = list(values)
        return sum(values) / len(values) if values else math.nan

    expected = {
        "clip_ratio/low_mean": mean(chain.from_iterable(low)),
        "clip_ratio/high_mean": mean(chain.from_iterable(high)),
        "clip_ratio/region_mean": mean(chain.from_iterable(low)) + mean(chain.from_iterable(high)),
        "clip_ratio/low_min": min(map(mean, low), default=math.nan),
        "clip_ratio/high_max": max(map(mean, high), default=math.nan),
    }
    metrics = results(run(batch, make_totals([batch], settings), settings).output.metrics)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, nan_ok=True)
