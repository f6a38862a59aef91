"""What must not change a step's gradient, for every objective: how it is cut into micro-batches, masked tokens, and order.

All in float64, so that equality means equality up to the order of additions.
"""

from dataclasses import replace

import pytest
import torch
from dispatched import Dispatched
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st
from objective.objective_batches import ALLOWED, Batch, correct, make_batch, make_settings, make_totals, pad, run, take

from grpo_cli.metrics import merge, results
from grpo_cli.objective.ratio import RatioLevel
from grpo_cli.objective.settings import LossType, ObjectiveSettings

EVERY_OBJECTIVE = pytest.mark.parametrize(("loss_type", "level"), ALLOWED, ids=[f"{a}-{b}" for a, b in ALLOWED])
FEW = limits(max_examples=12, deadline=None, derandomize=True)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    completions = draw(st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=6))
    return make_batch(
        [length for length, _ in completions],
        seed=draw(st.integers(0, 10_000)),
        masked=[masked for _, masked in completions],
        with_old=draw(st.booleans()),
    )


@st.composite
def options(draw: st.DrawFn) -> dict[str, object]:
    """Everything that an objective can be combined with."""
    mode = draw(st.sampled_from([None, "truncate", "mask"]))
    return {
        "delta": draw(st.sampled_from([None, 1.4])),
        "beta": draw(st.sampled_from([0.0, 0.1])),
        "use_bias_correction_kl": draw(st.booleans()),
        "top_entropy_quantile": draw(st.sampled_from([1.0, 0.4])),
        "entropy_coef": draw(st.sampled_from([0.0, 0.05])),
        "off_policy_mask_threshold": draw(st.sampled_from([None, 0.05])),
        "correction": None if mode is None else correct("token", mode),
    }


def close(left: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(left, right, atol=1e-12, rtol=1e-10)


def sequences_of(batch: Batch, numbers: torch.Tensor) -> tuple[Batch, torch.Tensor]:
    """The batch of the given sequences, in that order, and where its tokens stood."""
    tokens = torch.cat([(batch.tokens.sequence == number).nonzero().flatten() for number in numbers])
    return take(batch, tokens, numbers), tokens


@EVERY_OBJECTIVE
@FEW
@given(batch=batches(), changes=options(), data=st.data())
def test_gradient_does_not_depend_on_micro_batch_split(
    loss_type: LossType, level: RatioLevel, batch: Batch, changes: dict[str, object], data: st.DataObject
) -> None:
    settings = make_settings(loss_type, level, **changes)
    totals = make_totals([batch], settings)
    whole = run(batch, totals, settings)

    number = batch.tokens.advantages.numel()
    home = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=number, max_size=number)))
    grad_logps, grad_entropies = torch.zeros_like(batch.logps), torch.zeros_like(batch.logps)
    value, metrics = torch.zeros((), dtype=torch.float64), []
    for part in set(home.tolist()):
        piece, where = sequences_of(batch, (home == part).nonzero().flatten())
        outcome = run(piece, totals, settings)
        value = value + outcome.output.loss.detach()
        grad_logps[where], grad_entropies[where] = outcome.grad_logps, outcome.grad_entropies
        metrics.append(outcome.output.metrics)

    close(value, whole.output.loss.detach())
    close(grad_logps, whole.grad_logps)
    close(grad_entropies, whole.grad_entropies)
    assert results(merge(metrics)) == pytest.approx(results(whole.output.metrics), abs=1e-10, nan_ok=True)


@EVERY_OBJECTIVE
@FEW
@given(
    batch=batches(),
    changes=options(),
    places=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    filler=st.sampled_from([0.0, 1e30, float("inf"), float("nan")]),
)
def test_gradient_does_not_depend_on_masked_tokens(
    loss_type: LossType, level: RatioLevel, batch: Batch, changes: dict[str, object], places: list[int], filler: float
) -> None:
    settings = make_settings(loss_type, level, **changes)
    totals = make_totals([batch], settings)
    plain = run(batch, totals, settings)
    padded_batch, where = pad(batch, places, filler)
    padded = run(padded_batch, totals, settings)

    close(padded.output.loss, plain.output.loss)
    close(padded.grad_logps[where], plain.grad_logps)
    close(padded.grad_entropies[where], plain.grad_entropies)
    inserted = torch.ones(padded.grad_logps.shape, dtype=torch.bool).index_fill(0, where, False)
    assert torch.equal(padded.grad_logps[inserted], torch.zeros(len(places), dtype=torch.float64))
    assert results(padded.output.metrics) == pytest.approx(results(plain.output.metrics), abs=1e-12, nan_ok=True)


@EVERY_OBJECTIVE
@FEW
@given(batch=batches(), changes=options(), seed=st.integers(0, 1000))
def test_gradient_does_not_depend_on_row_or_token_order(
    loss_type: LossType, level: RatioLevel, batch: Batch, changes: dict[str, object], seed: int
) -> None:
    settings = make_settings(loss_type, level, **changes)
    totals = make_totals([batch], settings)
    plain = run(batch, totals, settings)

    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randperm(batch.logps.numel(), generator=generator)
    rows = torch.randperm(batch.tokens.advantages.numel(), generator=generator)
    shuffled = run(take(batch, tokens, rows), totals, settings)

    close(shuffled.output.loss, plain.output.loss)
    close(shuffled.grad_logps, plain.grad_logps[tokens])
    close(shuffled.grad_entropies, plain.grad_entropies[tokens])


@EVERY_OBJECTIVE
@FEW
@given(batch=batches(), changes=options())
def test_masked_completion_has_no_gradient_and_a_masked_batch_no_loss(
    loss_type: LossType, level: RatioLevel, batch: Batch, changes: dict[str, object]
) -> None:
    settings = make_settings(loss_type, level, **changes)
    nothing = replace(batch, tokens=replace(batch.tokens, loss_mask=torch.zeros_like(batch.tokens.loss_mask)))
    outcome = run(nothing, make_totals([nothing], settings), settings)
    assert outcome.output.loss.item() == 0
    assert not outcome.grad_logps.any()
    assert not outcome.grad_entropies.any()

    outcome = run(batch, make_totals([batch], settings), settings)
    assert not outcome.grad_logps[~batch.tokens.loss_mask].any()
    assert outcome.grad_logps.isfinite().all()


@EVERY_OBJECTIVE
@FEW
@given(batch=batches(), changes=options())
def test_completions_with_advantage_zero_have_exactly_no_policy_gradient(
    loss_type: LossType, level: RatioLevel, batch: Batch, changes: dict[str, object]
) -> None:
    settings = make_settings(loss_type, level, **{**changes, "beta": 0.0})
    advantages = batch.tokens.advantages.clone()
    advantages[::2] = 0
    silent = replace(batch, tokens=replace(batch.tokens, advantages=advantages))
    outcome = run(silent, make_totals([silent], settings), settings)
    assert not outcome.grad_logps[silent.tokens.sequence % 2 == 0].any()


@EVERY_OBJECTIVE
def test_batch_and_step_without_completions_have_no_loss(loss_type: LossType, level: RatioLevel) -> None:
    settings = make_settings(loss_type, level, beta=0.1, entropy_coef=0.1, top_entropy_quantile=0.5)
    batch = make_batch([], seed=0)
    assert run(batch, make_totals([batch], settings), settings).output.loss.item() == 0


def test_bnpo_is_the_mean_over_processes_of_the_mean_over_their_tokens() -> None:
    settings: ObjectiveSettings = make_settings(LossType.BNPO)
    shares = [make_batch([3, 2], seed=1), make_batch([4, 5, 1], seed=2)]
    together = make_totals(shares, settings)
    total = torch.zeros((), dtype=torch.float64)
    means = []
    for share in shares:
        alone = make_totals([share], settings)
        totals = replace(together, local_tokens=alone.local_tokens, processes=2)
        total = total + run(share, totals, settings).output.loss.detach()
        means.append(run(share, alone, settings).output.loss.detach())
    close(total, torch.stack(means).mean())


@EVERY_OBJECTIVE
def test_the_loss_looks_at_the_mask_once(loss_type: LossType, level: RatioLevel) -> None:
    """Wherever a shape depends on what a tensor holds, the host waits for a GPU."""
    settings = make_settings(loss_type, level, beta=0.1, entropy_coef=0.05, top_entropy_quantile=0.4)
    batch = make_batch([3, 5, 2], seed=0, masked=[False, True, False])
    totals = make_totals([batch], settings)
    with Dispatched() as seen:
        run(batch, totals, settings)
    masks = [one for _, places in seen.named("index") for one in places if one is not None and one.dtype == torch.bool]
    assert len(masks) + len(seen.named("nonzero", "masked_select", "_local_scalar_dense")) == 1
