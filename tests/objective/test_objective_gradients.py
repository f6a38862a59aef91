"""Gradients against finite differences and closed forms, and in other precisions."""

from dataclasses import replace

import pytest
import torch
from objective.objective_batches import ALLOWED, Batch, correct, make_batch, make_settings, make_totals, run

from grpo_cli.metrics import results
from grpo_cli.objective.loss import loss
from grpo_cli.objective.ratio import RatioLevel
from grpo_cli.objective.settings import LossType, ObjectiveSettings
from grpo_cli.types import TokenStats

EVERY_OBJECTIVE = pytest.mark.parametrize(("loss_type", "level"), ALLOWED, ids=[f"{a}-{b}" for a, b in ALLOWED])
LENGTHS = (3, 1, 5, 2)
STOPPED = (LossType.CISPO, LossType.VESPO)
"""Objectives that weigh log-probabilities by a weight without gradient."""


def away_from_kinks(batch: Batch, settings: ObjectiveSettings) -> bool:
    """No ratio within 1e-3 of a place where the derivative jumps."""
    assert batch.tokens.old_logps is not None
    log_ratio = batch.logps - batch.tokens.old_logps
    means = torch.stack([log_ratio[batch.tokens.sequence == i].mean() for i in range(len(LENGTHS))])
    ratios = torch.cat([log_ratio, means]).exp()
    kinks = torch.tensor([1 - settings.epsilon, 1 + settings.epsilon_high, settings.epsilon_high, settings.delta or 9])
    return bool(((ratios[:, None] - kinks).abs() > 1e-3).all())


@pytest.mark.parametrize(("loss_type", "level"), [pair for pair in ALLOWED if pair[0] not in STOPPED])
@pytest.mark.parametrize("beta", [0.0, 0.2])
def test_gradient_agrees_with_finite_differences(loss_type: LossType, level: RatioLevel, beta: float) -> None:
    settings = make_settings(
        loss_type,
        level,
        beta=beta,
        use_bias_correction_kl=True,
        delta=1.4,
        entropy_coef=0.1,
        correction=correct("token", "truncate"),
    )
    batch = make_batch(LENGTHS, seed=5, masked=[False, False, False, True])
    assert away_from_kinks(batch, settings)
    totals = make_totals([batch], settings)

    def scalar(logps: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
        stats = TokenStats(logps=logps, entropies=entropies, tokens_useful=0, tokens_computed=0)
        return loss(stats, batch.tokens, totals, settings).loss

    assert torch.autograd.gradcheck(
        scalar, (batch.logps.clone().requires_grad_(), batch.entropies.clone().requires_grad_())
    )


@pytest.mark.parametrize(("loss_type", "level"), [pair for pair in ALLOWED if pair[0] in STOPPED])
def test_stopped_weights_leave_a_loss_linear_in_the_log_probabilities(loss_type: LossType, level: RatioLevel) -> None:
    """Finite differences would move cispo's and vespo's weights too. Frozen, loss = sum over tokens of d loss / d log pi * log pi."""
    settings = make_settings(loss_type, level, correction=correct("token", "truncate"))
    batch = make_batch(LENGTHS, seed=5, masked=[False, False, False, True])
    outcome = run(batch, make_totals([batch], settings), settings)
    torch.testing.assert_close((outcome.grad_logps * batch.logps).sum(), outcome.output.loss.detach())
    assert outcome.grad_logps[batch.tokens.loss_mask].all()


@EVERY_OBJECTIVE
def test_first_pass_has_ratio_one_and_the_plain_policy_gradient(loss_type: LossType, level: RatioLevel) -> None:
    """Without old log-probabilities every objective's gradient is -A / n times its normalisation.

    d r / d log pi = r = 1 for ratios, d log pi = 1 for cispo and vespo (whose weights are 1), and a GSPO ratio passes each of the
    n tokens 1/n of the gradient of each of the n tokens: again 1.
    """
    settings = make_settings(loss_type, level)
    batch = make_batch(LENGTHS, seed=3, with_old=False)
    outcome = run(batch, make_totals([batch], settings), settings)

    lengths = torch.tensor(LENGTHS, dtype=torch.float64)
    per_token = lengths.sum()
    share = {
        LossType.GRPO: lengths * len(LENGTHS),
        LossType.SAPO: lengths * len(LENGTHS),
        LossType.DR_GRPO: torch.tensor(len(LENGTHS) * 16.0),
        LossType.LUSPO: torch.tensor(float(len(LENGTHS))),
    }.get(loss_type, per_token)
    expected = (-batch.tokens.advantages / share)[batch.tokens.sequence]
    torch.testing.assert_close(outcome.grad_logps, expected)
    metrics = results(outcome.output.metrics)
    assert all(value == 0 for name, value in metrics.items() if name.startswith(("clip_ratio", "cispo_clip_ratio")))
    assert metrics.get("vespo/phi_seq_mean", 1.0) == 1.0


@EVERY_OBJECTIVE
def test_first_pass_ratio_is_exactly_one_in_float32(loss_type: LossType, level: RatioLevel) -> None:
    """A bias-corrected KL multiplies by the ratio, so its value shows any ratio other than exactly 1."""
    batch = make_batch(LENGTHS, seed=4, with_old=False)
    batch = replace(batch, logps=batch.logps.float() * 37)
    plain = make_settings(loss_type, level, beta=0.3)
    corrected = replace(plain, use_bias_correction_kl=True)
    totals = make_totals([batch], plain)
    assert run(batch, totals, plain).output.loss.item() == run(batch, totals, corrected).output.loss.item()


@EVERY_OBJECTIVE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_has_the_precision_of_the_log_probabilities(
    loss_type: LossType, level: RatioLevel, dtype: torch.dtype
) -> None:
    settings = make_settings(loss_type, level, beta=0.1, entropy_coef=0.1, correction=correct("token", "mask"))
    batch = make_batch(LENGTHS, seed=6)
    exact = run(batch, make_totals([batch], settings), settings)
    cast = replace(batch, logps=batch.logps.to(dtype), entropies=batch.entropies.to(dtype))
    outcome = run(cast, make_totals([batch], settings), settings)
    assert outcome.output.loss.dtype == dtype
    assert outcome.grad_logps.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 0.0
    torch.testing.assert_close(outcome.grad_logps.double(), exact.grad_logps, atol=tolerance, rtol=0)


@EVERY_OBJECTIVE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", [50.0, 1e3, 1e6])
def test_distant_policies_give_finite_loss_and_gradient(
    loss_type: LossType, level: RatioLevel, dtype: torch.dtype, gap: float
) -> None:
    """exp(gap) overflows float32 from 89 on and float64 from 710 on; both signs of every gap and advantage are in the batch."""
    batch = make_batch([4, 4, 4, 4], seed=8)
    old, ref = batch.tokens.old_logps, batch.tokens.ref_logps
    assert old is not None
    assert ref is not None
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0] * 2 + [1.0] * 4 + [-1.0] * 4, dtype=torch.float64)
    tokens = replace(
        batch.tokens,
        advantages=torch.tensor([1.0, -1.0, -1.0, 1.0]),
        old_logps=old - gap * signs,
        ref_logps=ref + gap * signs.roll(1),
        behaviour_logps=batch.tokens.behaviour_logps - gap * signs.roll(2),
    )
    batch = replace(batch, logps=batch.logps.to(dtype), tokens=tokens)
    settings = make_settings(
        loss_type, level, beta=0.1, use_bias_correction_kl=True, correction=correct("token", "truncate", None, None)
    )
    outcome = run(batch, make_totals([batch], settings), settings)
    assert outcome.output.loss.isfinite()
    assert outcome.grad_logps.isfinite().all()
    assert all(abs(value) < float("inf") for value in results(outcome.output.metrics).values())
