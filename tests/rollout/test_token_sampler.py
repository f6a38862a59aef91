"""The sampler against the exact distribution, transformers' penalty, and streams that do not depend on the batch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from grpo_cli.distribution import filter_logits
from grpo_cli.rollout.local.sampler import TokenSampler, invert_cdf
from grpo_cli.types import Sampling

Settings = Callable[..., Sampling]
CPU = torch.device("cpu")


def sampler_of(sampling: Sampling, rows: int, prompts: list[list[int]] | None = None) -> TokenSampler:
    sampler = TokenSampler(sampling, device=CPU)
    sampler.join(prompts or [[0]] * rows, list(range(rows)))
    return sampler


def at(position: int, rows: int) -> torch.Tensor:
    return torch.full((rows,), position)


def upper_chi_square(degrees: int, deviations: float) -> float:
    """Quantile of the chi-square distribution at a number of normal deviations (Wilson and Hilferty 1931)."""
    spread = 2 / (9 * degrees)
    return float(degrees * (1 - spread + deviations * spread**0.5) ** 3)


@pytest.mark.parametrize(
    "changes",
    [{}, {"temperature": 0.6}, {"temperature": 1.5, "top_k": 9}, {"top_p": 0.7}, {"min_p": 0.1, "temperature": 1.2}],
    ids=str,
)
def test_frequencies_are_those_of_the_distribution(changes: dict[str, Any], settings: Settings) -> None:
    rows, positions = 2000, 50
    sampling = settings(stop_ids=(0,), max_tokens=positions, **changes)
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(5)) * 1.5
    sampler = sampler_of(sampling, rows)
    draws = torch.cat([sampler.draw(logits.expand(rows, -1), at(position, rows))[0] for position in range(positions)])
    kept = filter_logits(
        logits.double() / sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p
    )
    expected = kept.softmax(dim=-1)[0] * len(draws)
    counts = draws.bincount(minlength=30).double()
    possible = expected > 0
    assert (counts[~possible] == 0).all()
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum().item()
    # The seeds are fixed, so this either holds or does not; 3.5 deviations leave 2 chances in 10,000 to be unlucky with them.
    assert statistic < upper_chi_square(int(possible.sum()) - 1, 3.5)


def test_neighbouring_positions_and_rows_are_uncorrelated(settings: Settings) -> None:
    sampling = settings(stop_ids=(0,), max_tokens=100)
    sampler = sampler_of(sampling, 500)
    flat = torch.zeros(500, 1000)
    draws = torch.stack([sampler.draw(flat, at(position, 500))[0] for position in range(100)], dim=1).double()
    centred = (draws - draws.mean()) / draws.std()
    for shifted in (centred[:, :-1] * centred[:, 1:], centred[:-1] * centred[1:]):
        assert abs(shifted.mean().item()) * shifted.numel() ** 0.5 < 4


def test_a_row_draws_the_same_among_others_and_after_rows_have_left(settings: Settings) -> None:
    sampling = settings(stop_ids=(0,), max_tokens=4, repetition_penalty=1.5)
    prompts = [[1, 2], [3], [4, 5, 6]]
    logits = torch.randn(4, 3, 20, generator=torch.Generator().manual_seed(0))
    batch = TokenSampler(sampling, device=CPU)
    batch.join(prompts, [10, 11, 12])
    alone = TokenSampler(sampling, device=CPU)
    alone.join(prompts[2:], [12])
    for position in range(4):
        rows = logits[position] if position < 2 else logits[position, [0, 2]]
        if position == 2:
            batch.keep([0, 2])
        tokens, logps = batch.draw(rows, at(position, len(rows)))
        single_token, single_logp = alone.draw(logits[position, 2:], at(position, 1))
        assert tokens[-1] == single_token[0]
        torch.testing.assert_close(logps[-1], single_logp[0])


def test_a_shorter_limit_draws_the_same_tokens(settings: Settings) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    long = sampler_of(settings(max_tokens=40, stop_ids=(0,)), 3)
    short = sampler_of(settings(max_tokens=7, stop_ids=(0,)), 3)
    for position in range(7):
        assert torch.equal(long.draw(logits, at(position, 3))[0], short.draw(logits, at(position, 3))[0])


def test_repetition_penalty_is_that_of_transformers(settings: Settings) -> None:
    penalty = 1.7
    sampling = settings(temperature=0.0, repetition_penalty=penalty, stop_ids=(0,))
    seen = torch.tensor([[3, 7, 7, 11], [0, 1, 2, 3]])
    sampler = sampler_of(sampling, 2, prompts=seen.tolist())
    reference = RepetitionPenaltyLogitsProcessor(penalty)
    generator = torch.Generator().manual_seed(3)
    for position in range(6):
        logits = torch.randn(2, 15, generator=generator) * 3
        expected = reference(seen, logits.clone())
        tokens, logps = sampler.draw(logits, at(position, 2))
        assert torch.equal(tokens, expected.argmax(dim=-1))
        torch.testing.assert_close(logps, expected.log_softmax(dim=-1).amax(dim=-1))
        seen = torch.cat([seen, tokens[:, None]], dim=1)


def test_drawing_leaves_the_logits_as_they_were(settings: Settings) -> None:
    logits = torch.randn(2, 15, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    sampling = settings(stop_ids=(3,), min_tokens=2, repetition_penalty=1.3, top_k=4, temperature=0.5)
    sampler_of(sampling, 2).draw(logits, at(0, 2))
    assert torch.equal(logits, before)


def test_stop_tokens_are_impossible_before_min_tokens_and_possible_from_there(settings: Settings) -> None:
    sampling = settings(stop_ids=(1, 2), min_tokens=2, max_tokens=3)
    logits = torch.tensor([0.0, 9.0, 9.0, 0.0]).expand(200, -1)
    sampler = sampler_of(sampling, 200)
    for position in range(2):
        tokens, logps = sampler.draw(logits, at(position, 200))
        assert set(tokens.tolist()) == {0, 3}
        torch.testing.assert_close(logps, torch.full((200,), 0.5).log())
    assert {1, 2} <= set(sampler.draw(logits, at(2, 200))[0].tolist())


def test_inversion_takes_the_token_whose_interval_holds_the_uniform() -> None:
    probabilities = torch.tensor([0.25, 0.0, 0.5, 0.25, 0.0])
    uniforms = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2.0**-24])
    tokens, totals = invert_cdf(probabilities.expand(6, -1), uniforms)
    assert tokens.tolist() == [0, 0, 2, 2, 3, 3]
    assert totals.tolist() == [1.0] * 6


def test_inversion_allows_for_a_sum_that_rounding_left_below_one() -> None:
    probabilities = torch.tensor([[0.5, 0.4999, 0.0]])
    assert invert_cdf(probabilities, torch.tensor([1 - 2.0**-24]))[0].tolist() == [1]


def test_inversion_takes_the_tokens_of_one_long_sum_in_double_precision() -> None:
    """Blocks do not show: 1,000 tokens are no multiple of any block, and the weights are no probabilities."""
    generator = torch.Generator().manual_seed(2)
    weights = torch.rand(500, 1000, generator=generator) ** 4 * 7
    uniforms = torch.rand(500, generator=generator)
    cumulative = weights.double().cumsum(dim=1)
    above = cumulative > uniforms[:, None].double() * cumulative[:, -1:]
    tokens, totals = invert_cdf(weights, uniforms)
    assert torch.equal(tokens, above.int().argmax(dim=1))
    torch.testing.assert_close(totals.double(), cumulative[:, -1], rtol=1e-6, atol=0)


def test_rows_draw_by_their_own_position_and_join_with_their_own_prompt(settings: Settings) -> None:
    sampling = settings(stop_ids=(2, 5), max_tokens=6, min_tokens=2, repetition_penalty=1.4)
    logits = torch.randn(6, 1, 20, generator=torch.Generator().manual_seed(0))

    def alone(seed: int, prompt: list[int], position: int) -> tuple[torch.Tensor, torch.Tensor]:
        sampler = TokenSampler(sampling, device=CPU)
        sampler.join([prompt], [seed])
        for earlier in range(position):
            sampler.draw(logits[earlier], at(earlier, 1))
        return sampler.draw(logits[position], at(position, 1))

    batch = TokenSampler(sampling, device=CPU)
    batch.join([[1, 2]], [10])
    for position in range(2):
        batch.draw(logits[position], at(position, 1))
    batch.join([[3], [4]], [11, 12])
    tokens, logps = batch.draw(logits[[2, 0, 0], 0], torch.tensor([2, 0, 0]))
    expected = [alone(10, [1, 2], 2), alone(11, [3], 0), alone(12, [4], 0)]
    assert torch.equal(tokens, torch.cat([one[0] for one in expected]))
    torch.testing.assert_close(logps, torch.cat([one[1] for one in expected]))


def test_inversion_never_takes_an_impossible_token_at_the_edges() -> None:
    """The least and the greatest uniform, with impossible tokens on both sides, at the size of a real vocabulary."""
    logits = torch.randn(64, 50_000, generator=torch.Generator().manual_seed(0))
    logits[:, :100] = logits[:, -100:] = -torch.inf
    probabilities = logits.softmax(dim=-1)
    for edge in (0.0, 1 - 2.0**-24):
        tokens, _ = invert_cdf(probabilities, torch.full((64,), edge))
        assert (probabilities.gather(1, tokens[:, None]) > 0).all()


def test_half_precision_logits_give_float32_logps(settings: Settings) -> None:
    logits = torch.randn(2, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    tokens, logps = sampler_of(settings(stop_ids=(0,)), 2).draw(logits, at(0, 2))
    assert logps.dtype == torch.float32
    torch.testing.assert_close(logps, logits.float().log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0])
