"""The filters of the sampling distribution against a brute-force reading of their definitions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_cli.distribution import filter_logits


def keep_by_definition(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """Which tokens are kept, one filter after the other, in float64 and without vector code."""
    kept = set(range(len(logits)))
    ordered = sorted(kept, key=lambda token: -logits[token])
    if top_k and top_k < len(logits):
        last = logits[ordered[top_k - 1]]
        kept = {token for token in kept if logits[token] >= last}
    if top_p < 1.0:
        total = math.fsum(math.exp(logits[token]) for token in kept)
        mass, last = 0.0, math.inf
        for token in (token for token in ordered if token in kept):
            if mass >= top_p:
                break
            mass, last = mass + math.exp(logits[token]) / total, logits[token]
        kept = {token for token in kept if logits[token] >= last}
    if min_p > 0.0:
        largest = max(logits)
        kept = {token for token in kept if math.exp(logits[token] - largest) >= min_p}
    return kept


def kept_by(filtered: torch.Tensor) -> set[int]:
    return set(torch.isfinite(filtered).nonzero()[:, 0].tolist())


@settings(max_examples=300, deadline=None)
@given(
    # Multiples of 1/4 make ties common; the odd thresholds keep a sum in float32 from landing on them.
    logits=st.lists(st.integers(-16, 16).map(lambda number: number / 4), min_size=1, max_size=30),
    top_k=st.integers(0, 32),
    top_p=st.sampled_from([0.0123, 0.3177, 0.5231, 0.9017, 0.98765, 1.0]),
    min_p=st.sampled_from([0.0, 0.0123, 0.1234, 0.4567, 0.98765]),
)
def test_filters_keep_what_their_definitions_keep(logits: list[float], top_k: int, top_p: float, min_p: float) -> None:
    given_logits = torch.tensor(logits)
    filtered = filter_logits(given_logits, top_k=top_k, top_p=top_p, min_p=min_p)
    kept = keep_by_definition(logits, top_k, top_p, min_p)
    assert kept_by(filtered) == kept
    assert all(filtered[token] == given_logits[token] for token in kept)
    assert int(given_logits.argmax()) in kept


@pytest.mark.parametrize("filters", [{"top_k": 2}, {"top_p": 0.4}, {"min_p": 0.9}], ids=str)
def test_ties_with_the_last_kept_token_are_kept(filters: dict[str, float]) -> None:
    logits = torch.tensor([0.0, 2.0, -1.0, 2.0, 2.0])
    filtered = filter_logits(logits, **filters)  # type: ignore[arg-type]
    assert kept_by(filtered) == {1, 3, 4}


def test_settings_that_are_off_return_the_logits_themselves() -> None:
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    assert filter_logits(logits, top_k=0, top_p=1.0, min_p=0.0) is logits
    assert filter_logits(logits, top_k=7) is logits
    assert filter_logits(logits, top_k=100) is logits


def test_rows_are_filtered_independently_whatever_the_leading_shape() -> None:
    logits = torch.randn(2, 3, 11, generator=torch.Generator().manual_seed(1)) * 3
    together = filter_logits(logits, top_k=6, top_p=0.8, min_p=0.05)
    for row, expected in zip(logits.flatten(0, 1), together.flatten(0, 1), strict=True):
        assert torch.equal(filter_logits(row, top_k=6, top_p=0.8, min_p=0.05), expected)


def test_a_later_filter_sees_the_renormalised_outcome_of_an_earlier_one() -> None:
    """Probabilities 0.4, 0.3, 0.2, 0.1: top-k 2 leaves 0.57 and 0.43, of which top-p 0.5 needs one; of all four, two."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert kept_by(filter_logits(logits, top_p=0.5)) == {0, 1}
    assert kept_by(filter_logits(logits, top_k=2, top_p=0.5)) == {0}


def test_only_kept_logits_have_a_gradient_and_it_is_that_of_their_own_softmax() -> None:
    logits = torch.tensor([[1.0, 0.5, -0.5, -2.0]], dtype=torch.float64, requires_grad=True)
    filtered = filter_logits(logits, top_k=3, top_p=0.99, min_p=0.01)
    (gradient,) = torch.autograd.grad(filtered.log_softmax(dim=-1)[0, 1], logits)
    # d log p_i / d z_j = [i = j] - p_j over the kept tokens.
    probabilities = torch.tensor([1.0, 0.5, -0.5], dtype=torch.float64).softmax(dim=-1)
    expected = torch.cat([torch.tensor([0.0, 1.0, 0.0]) - probabilities, torch.zeros(1)])
    torch.testing.assert_close(gradient[0], expected.double())


def test_bfloat16_logits_stay_bfloat16() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(2)).bfloat16()
    filtered = filter_logits(logits, top_k=10, top_p=0.9, min_p=0.1)
    assert filtered.dtype == torch.bfloat16
    assert torch.isfinite(filtered).any(dim=-1).all()
