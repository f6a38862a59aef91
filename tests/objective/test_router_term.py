"""The load-balancing loss of a mixture of experts as a part of the loss."""

from dataclasses import replace

import torch
from objective.objective_batches import make_batch, make_settings, make_totals

from grpo_cli.metrics import results
from grpo_cli.objective.loss import loss
from grpo_cli.objective.settings import LossType
from grpo_cli.types import RouterStats, TokenStats


def test_the_router_loss_is_the_mean_over_micro_batches_weighted_by_their_tokens() -> None:
    batch = make_batch((3, 4), seed=0)
    settings = make_settings(LossType.DAPO, router_aux_loss_coef=0.1)
    totals = replace(make_totals([batch], settings), router_tokens=40.0)
    plain = TokenStats(logps=batch.logps, entropies=batch.entropies, tokens_useful=0, tokens_computed=0)
    without = loss(plain, batch.tokens, totals, settings)
    balance = torch.tensor(2.5, dtype=torch.float64, requires_grad=True)
    output = loss(
        plain._replace(routers=RouterStats(loss=balance, shares=torch.ones(2), tokens=10)),
        batch.tokens,
        totals,
        settings,
    )
    torch.testing.assert_close(output.loss, without.loss + 0.1 * 2.5 * 10 / 40)
    torch.autograd.backward(output.loss)
    assert balance.grad is not None
    torch.testing.assert_close(balance.grad, torch.tensor(0.1 * 10 / 40, dtype=torch.float64))
    assert results(output.metrics)["aux_loss"] == 2.5 * 10 / 40
    assert "aux_loss" not in without.metrics
