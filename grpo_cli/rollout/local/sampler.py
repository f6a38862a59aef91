"""From logits to tokens.

Letters: R rows (completions being sampled at once), V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo_cli.distribution import filter_logits
from grpo_cli.types import Sampling

_BLOCK = 64
"""Tokens that are summed together first; vocabularies are mostly multiples of it."""


class TokenSampler:
    """Draws one token for each row of a batch, each row from its own stream of random numbers.

    A token is drawn by inverting the cumulative distribution at one uniform number, which depends on the row's seed and on the
    token's position alone: so a row's tokens do not depend on its neighbours. Tokens are drawn in float32 from 24-bit uniforms:
    the chance of each differs from its probability by some 1e-7 at most.

    Args:
        sampling: The distribution.
        device: Where the logits are.
    """

    def __init__(self, sampling: Sampling, *, device: torch.device) -> None:
        self._sampling = sampling
        self._device = device
        self._banned_ids = torch.tensor(sampling.banned_ids, dtype=torch.long, device=device)
        self._stop_ids = torch.tensor(sampling.stop_ids, dtype=torch.long, device=device)
        self._uniforms = torch.empty(0, sampling.max_tokens, device=device)
        self._penalised = sampling.repetition_penalty != 1.0
        self._prompts: list[Tensor] = []
        self._seen: Tensor | None = None

    def join(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> None:
        """Add rows after those that are there.

        Args:
            prompts: One per row; the repetition penalty counts their tokens as seen.
            seeds: One per row.
        """
        # Drawn on the CPU, whose generator gives the same numbers whatever the accelerator.
        uniforms = torch.stack([_uniforms(seed, self._sampling.max_tokens) for seed in seeds]).to(self._device)
        self._uniforms = torch.cat([self._uniforms, uniforms])
        if self._penalised:
            self._prompts = [torch.tensor(prompt, device=self._device) for prompt in prompts]

    def draw(self, logits: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Draw the next token of each row.

        Args:
            logits: float [R, V] in any precision, as the model gives them.
            positions: int64 [R], index of the token within each row's completion.

        Returns:
            tokens: int64 [R].
            logps: float32 [R], log-probabilities under the distribution that was drawn from; with temperature 0, where the
                likeliest token is taken, under that of temperature 1.
        """
        sampling = self._sampling
        logits = self._with_penalty(logits.float())
        if sampling.temperature not in (0.0, 1.0):
            logits = logits / sampling.temperature
        if sampling.banned_ids:
            logits = logits.index_fill(1, self._banned_ids, -torch.inf)
        if sampling.min_tokens:
            early = (positions < sampling.min_tokens)[:, None]
            stops = logits[:, self._stop_ids].masked_fill(early, -torch.inf)
            logits = logits.index_copy(1, self._stop_ids, stops)
        logits = filter_logits(logits, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)
        largest = logits.amax(dim=-1, keepdim=True)
        weights = (logits - largest).exp_()
        if sampling.temperature == 0.0:
            tokens, total = logits.argmax(dim=-1), weights.sum(dim=-1)
        else:
            uniforms = self._uniforms.gather(1, positions[:, None])[:, 0]
            tokens, total = invert_cdf(weights, uniforms)
        if self._seen is not None:
            self._seen.scatter_(1, tokens[:, None], value=True)
        return tokens, (logits.gather(1, tokens[:, None]) - largest)[:, 0] - total.log()

    def keep(self, places: Sequence[int]) -> None:
        """Go on with some of the rows.

        Args:
            places: The row that each place is taken by.
        """
        rows = torch.tensor(places, dtype=torch.long, device=self._device)
        self._uniforms = self._uniforms[rows]
        if self._seen is not None:
            self._seen = self._seen[rows]

    def _with_penalty(self, logits: Tensor) -> Tensor:
        """Lower the logits of tokens in the prompt or the completion so far (Keskar et al. 2019, section 4.1).

        Positive logits are divided by the penalty and negative ones multiplied, as transformers does it.
        """
        if not self._penalised:
            return logits
        if self._prompts:  # the logits tell the size of the vocabulary
            joined = logits.new_zeros(len(self._prompts), logits.shape[1], dtype=torch.bool)
            for row, prompt in enumerate(self._prompts):
                joined[row, prompt] = True
            self._seen = joined if self._seen is None else torch.cat([self._seen, joined])
            self._prompts = []
        assert self._seen is not None
        penalty = self._sampling.repetition_penalty
        return torch.where(self._seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def invert_cdf(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Take the first token whose cumulative weight exceeds a share of the whole.

    The sum is built in two levels, first over blocks of tokens and then within one of them: less work, and less rounding.

    Args:
        weights: float32 [R, V], not negative, each row with a sum above 0: probabilities times any factor.
        uniforms: float32 [R] in [0, 1), the shares.

    Returns:
        tokens: int64 [R]; never a token of weight 0.
        totals: float32 [R], sums of the rows.
    """
    padding = -weights.shape[1] % _BLOCK
    padded = pad(weights, (0, padding)) if padding else weights
    blocks = padded.view(len(weights), -1, _BLOCK)
    sums = blocks.sum(dim=-1)
    cumulative = sums.cumsum(dim=-1)
    # Scaled by what the sum really is, so that rounding cannot leave the last token out or overrun it.
    thresholds = uniforms[:, None] * cumulative[:, -1:]
    block = _first_above(sums, cumulative, thresholds)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0]
    thresholds = thresholds - (cumulative - sums).gather(1, block)
    tokens = block * _BLOCK + _first_above(inside, inside.cumsum(dim=-1), thresholds)
    return tokens[:, 0], cumulative[:, -1]


def _first_above(weights: Tensor, cumulative: Tensor, thresholds: Tensor) -> Tensor:
    """Find where a cumulative sum [R, W] first exceeds a threshold [R, 1], as int64 [R, 1]; never a place of weight 0."""
    places = torch.searchsorted(cumulative, thresholds, right=True).clamp_(max=weights.shape[1] - 1)
    # By rounding, the threshold may be above the sum, and a sum made in parallel may rise where the weight is 0.
    largest = weights.argmax(dim=1, keepdim=True)
    return torch.where(weights.gather(1, places) > 0, places, largest)


def _uniforms(seed: int, count: int) -> Tensor:
    """Uniform numbers float32 [count] on the CPU; a larger count goes on where a smaller one ends."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed))
