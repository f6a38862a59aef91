"""From logits to tokens.

Letters: R rows (completions being sampled at once), V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_cli.distribution import filter_logits
from grpo_cli.types import Sampling


class TokenSampler:
    """Draws one token for each row of a batch, each row from its own stream of random numbers.

    A token is drawn by inverting the cumulative distribution at one uniform number, which depends on the row's seed and on the
    token's position alone: so a row's tokens do not depend on its neighbours. Tokens are drawn in float32 from 24-bit uniforms:
    the chance of each differs from its probability by some 1e-7 at most.

    Args:
        sampling: The distribution.
        prompts: R prompts; the repetition penalty counts their tokens as seen.
        seeds: R seeds.
        device: Where the logits are.
    """

    def __init__(
        self, sampling: Sampling, *, prompts: Sequence[Sequence[int]], seeds: Sequence[int], device: torch.device
    ) -> None:
        self._sampling = sampling
        self._prompts = prompts
        self._seen: Tensor | None = None
        self._stop_ids = torch.tensor(sampling.stop_ids, dtype=torch.long, device=device)
        # Drawn on the CPU, whose generator gives the same numbers whatever the accelerator.
        self._uniforms = torch.stack([_uniforms(seed, sampling.max_tokens) for seed in seeds]).to(device)

    def draw(self, logits: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Draw the next token of each row.

        Args:
            logits: float [R, V] in any precision, as the model gives them.
            position: Index of the token within the completions.

        Returns:
            tokens: int64 [R].
            logps: float32 [R], log-probabilities under the distribution that was drawn from; with temperature 0, where the
                likeliest token is taken, under that of temperature 1.
        """
        sampling = self._sampling
        logits = self._penalised(logits.float())
        if sampling.temperature not in (0.0, 1.0):
            logits = logits / sampling.temperature
        if position < sampling.min_tokens:
            logits = logits.index_fill(1, self._stop_ids, -torch.inf)
        logits = filter_logits(logits, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)
        probabilities = logits.softmax(dim=-1)
        if sampling.temperature == 0.0:
            tokens = logits.argmax(dim=-1)
        else:
            tokens = invert_cdf(probabilities, self._uniforms[:, position])
        if self._seen is not None:
            self._seen.scatter_(1, tokens[:, None], value=True)
        return tokens, probabilities.gather(1, tokens[:, None])[:, 0].log()

    def keep(self, rows: Tensor) -> None:
        """Go on with some of the rows only.

        Args:
            rows: int64, their places in the batch.
        """
        self._uniforms = self._uniforms[rows]
        if self._seen is not None:
            self._seen = self._seen[rows]

    def _penalised(self, logits: Tensor) -> Tensor:
        """Lower the logits of tokens in the prompt or the completion so far (Keskar et al. 2019, section 4.1).

        Positive logits are divided by the penalty and negative ones multiplied, as transformers does it.
        """
        penalty = self._sampling.repetition_penalty
        if penalty == 1.0:
            return logits
        if self._seen is None:  # the first logits tell the size of the vocabulary
            self._seen = torch.zeros_like(logits, dtype=torch.bool)
            for row, prompt in enumerate(self._prompts):
                self._seen[row, torch.tensor(prompt, device=logits.device)] = True
        return torch.where(self._seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def invert_cdf(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Take the first token whose cumulative probability exceeds a uniform number.

    Args:
        probabilities: float32 [R, V], rows sum to 1 up to rounding.
        uniforms: float32 [R] in [0, 1).

    Returns:
        int64 [R]; never a token of probability 0.
    """
    cumulative = probabilities.cumsum(dim=-1)
    # Scaled by what the sum really is, so that rounding cannot leave the last token out or overrun it.
    thresholds = uniforms[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, thresholds, right=True).clamp_(max=probabilities.shape[-1] - 1)
    # Summed in parallel, as accelerators do, the sum may rise by rounding where the probability is 0.
    likeliest = probabilities.argmax(dim=-1, keepdim=True)
    return torch.where(probabilities.gather(1, tokens) > 0, tokens, likeliest)[:, 0]


def _uniforms(seed: int, count: int) -> Tensor:
    """Uniform numbers float32 [count] on the CPU; a larger count goes on where a smaller one ends."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed))
