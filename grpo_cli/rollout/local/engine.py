"""The local engine: generation with the policy itself, in this process, sharing its weights.

It prefills each prompt once per group, copies the cache to the group's rows, drops rows that have finished, and keeps the
log-probability of every token it draws. It leaves out what a serving engine adds: paged caches and admission of new rows
while others are being sampled.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from grpo_cli.rollout.local.decoder import Decoder, evaluating
from grpo_cli.rollout.local.sampler import TokenSampler
from grpo_cli.rollout.local.stops import StopCheck
from grpo_cli.rollout.sampling import sample_seed
from grpo_cli.types import Completion, FinishReason, Group, PolicyVersion, Prompt, Sampling

_FULL_ENOUGH = 0.875
"""Finished rows leave when less than this share of the batch is still being sampled: each leaving copies the cache."""


class LocalEngine:
    """Samples from a transformers causal language model. See `RolloutEngine`.

    Log-probabilities are float32 and those of the model as it runs here: on the same weights in float32 they agree with a forward
    over the whole sequence to about 1e-5; in bfloat16 the two forwards round differently, to about 1e-2.

    Args:
        model: The policy, not wrapped for distributed training. It samples in evaluation mode and in the caller's autocast.
        tokenizer: Decodes completions.
        max_num_seqs: Most completions that are sampled at once; bounds memory, does not change what is sampled.
        on_progress: Called after every decoding step with the number of tokens it added.
    """

    def __init__(
        self, model: Any, tokenizer: Any, *, max_num_seqs: int, on_progress: Callable[[int], None] | None = None
    ) -> None:
        assert max_num_seqs >= 1, max_num_seqs
        self._model = model
        self._tokenizer = tokenizer
        self._max_num_seqs = max_num_seqs
        self._on_progress = on_progress
        self._version = PolicyVersion(0)

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, num_generations: int, seed_key: tuple[int | str, ...]
    ) -> list[Group]:
        """Sample `num_generations` completions for each prompt. See `RolloutEngine.generate`."""
        if not prompts:
            return []
        completions: dict[tuple[int, int], Completion] = {}
        with evaluating(self._model):
            decoder = Decoder(self._model)
            waves = _waves(
                [len(prompt.ids) for prompt in prompts],
                num_generations=num_generations,
                max_num_seqs=self._max_num_seqs,
                mix_prompts=decoder.rows_are_independent,
            )
            for numbers, samples in waves:
                rows = [_Row(number=number, index=index) for number in numbers for index in samples]
                seeds = [sample_seed(seed_key, prompts[row.number].uid, row.index) for row in rows]
                logps = self._sample(decoder, [prompts[number].ids for number in numbers], rows, sampling, seeds)
                texts = self._tokenizer.batch_decode([row.ids for row in rows], skip_special_tokens=True)
                for row, row_logps, text in zip(rows, logps, texts, strict=True):
                    completions[row.number, row.index] = self._completion(row, row_logps, text)
        return [
            Group(prompt=prompt, completions=tuple(completions[number, index] for index in range(num_generations)))
            for number, prompt in enumerate(prompts)
        ]

    def sync(self, named_weights: Iterable[tuple[str, Tensor]], version: PolicyVersion) -> None:  # noqa: ARG002  shared
        """Take the version number; the weights are the trainer's own."""
        self._version = version

    def close(self) -> None:
        """Do nothing: the engine holds nothing of its own between two calls."""

    def _sample(
        self,
        decoder: Decoder,
        prompts: Sequence[tuple[int, ...]],
        rows: list["_Row"],
        sampling: Sampling,
        seeds: list[int],
    ) -> Tensor:
        """Fill rows with sampled tokens.

        Args:
            decoder: Runs the model.
            prompts: Tokens of the wave's prompts.
            rows: Empty rows, the same number for each prompt, prompt by prompt.
            sampling: How to draw.
            seeds: One per row.

        Returns:
            float32 [rows, max_tokens], CPU: log-probabilities, valid up to each row's length.
        """
        stops = StopCheck(self._tokenizer, sampling)
        repeats = len(rows) // len(prompts)
        logits = decoder.prefill(prompts, repeats)
        repeated = [prompt for prompt in prompts for _ in range(repeats)]
        sampler = TokenSampler(sampling, prompts=repeated, seeds=seeds, device=logits.device)
        logps = torch.zeros(len(rows), sampling.max_tokens, device=logits.device)
        held, places = rows, torch.arange(len(rows), device=logits.device)
        for position in range(sampling.max_tokens):
            tokens, logps[places, position] = sampler.draw(logits, position)
            self._append(held, tokens.tolist(), stops)
            going = [place for place, row in enumerate(held) if not row.stopped]
            if not going or position + 1 == sampling.max_tokens:
                break
            if decoder.rows_are_independent and len(going) < _FULL_ENOUGH * len(held):
                staying = torch.tensor(going, device=logits.device)
                held = [held[place] for place in going]
                places, tokens = places[staying], tokens[staying]
                sampler.keep(staying)
                decoder.keep(staying)
            logits = decoder.step(tokens)
        return logps.cpu()

    def _append(self, held: list["_Row"], tokens: list[int], stops: StopCheck) -> None:
        """Append one token to each row that has not stopped, and see which stop now."""
        going = [(row, token) for row, token in zip(held, tokens, strict=True) if not row.stopped]
        for row, token in going:
            row.ids.append(token)
        for (row, _), stopped in zip(going, stops.ended([row.ids for row, _ in going]), strict=True):
            row.stopped = stopped
        if self._on_progress is not None:
            self._on_progress(len(going))

    def _completion(self, row: "_Row", logps: Tensor, text: str) -> Completion:
        """Close a row."""
        return Completion(
            index=row.index,
            ids=tuple(row.ids),
            logps=logps[: len(row.ids)].clone(),  # a view would keep the whole wave's storage alive
            text=text,
            finish_reason=FinishReason.STOP if row.stopped else FinishReason.LENGTH,
            policy_version=self._version,
        )


@dataclass(kw_only=True, slots=True)
class _Row:
    """A completion while it grows.

    Attributes:
        number: Which of the call's prompts it answers.
        index: 0..G-1 within its group.
        ids: Tokens so far.
        stopped: Whether the last of them ended it.
    """

    number: int
    index: int
    ids: list[int] = field(default_factory=list)
    stopped: bool = False


def _waves(
    lengths: Sequence[int], *, num_generations: int, max_num_seqs: int, mix_prompts: bool
) -> Iterator[tuple[list[int], range]]:
    """Divide the work: numbers of prompts, and which samples of each of them are drawn at once.

    Prompts of similar length share a wave, for little padding; the longest come first, so memory that is too small shows early.
    A group larger than `max_num_seqs` takes several waves.
    """
    order = sorted(range(len(lengths)), key=lambda number: lengths[number], reverse=True)
    together = max(1, max_num_seqs // num_generations) if mix_prompts else 1
    for start in range(0, len(order), together):
        for first in range(0, num_generations, max_num_seqs):
            samples = range(first, min(first + max_num_seqs, num_generations))
            yield order[start : start + together], samples
