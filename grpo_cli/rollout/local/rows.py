"""Rows from waiting to finished: who joins, what each step adds, who leaves.

Letters: R rows, V vocabulary.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_cli.rollout.local.decoder import Decoder
from grpo_cli.rollout.local.sampler import TokenSampler
from grpo_cli.rollout.local.stops import StopCheck
from grpo_cli.types import FinishReason, Sampling

_PROMPT_TOKENS_AT_ONCE = 4096
"""Prompts that can join one by one go through the model in parts of this size, or a single longer one: bounds activations."""


@dataclass(kw_only=True, slots=True)
class Row:
    """A completion while it grows.

    Attributes:
        number: Which of the call's prompts it answers.
        index: 0..G-1 within its group.
        seed: Of its random numbers.
        ids: Tokens so far.
        logps: Their log-probabilities.
        finish_reason: Why it has ended; None while it goes on.
    """

    number: int
    index: int
    seed: int
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def restart(self) -> None:
        """Forget what was sampled."""
        self.ids, self.logps = [], []

    def append(self, token: int, logp: float) -> None:
        """Grow by a token and its log-probability."""
        self.ids.append(token)
        self.logps.append(logp)


class RowSampler:
    """Samples rows, as many at once as there is room for.

    Args:
        decoder: Runs the model.
        sampling: How to draw.
        stops: What ends a row before its longest.
        prompts: Tokens of the prompts.
        slots: Most rows at once.
        max_cached_tokens: Most prompt and completion tokens that are held at once, unless a single row has more; None: no limit.
        on_progress: Called after every step with the number of tokens it added.
        on_finished: Called with every row that has finished.
    """

    def __init__(
        self,
        decoder: Decoder,
        sampling: Sampling,
        *,
        stops: StopCheck,
        prompts: Sequence[Sequence[int]],
        slots: int,
        max_cached_tokens: int | None = None,
        on_progress: Callable[[int], None],
        on_finished: Callable[[Row], None],
    ) -> None:
        self._max_cached_tokens = max_cached_tokens
        self._decoder = decoder
        self._sampling = sampling
        self._stops = stops
        self._prompts = prompts
        self._slots = slots
        self._on_progress = on_progress
        self._on_finished = on_finished
        self._sampler: TokenSampler | None = None

    def run(self, rows: Sequence[Row]) -> None:
        """Sample until all rows have finished.

        Args:
            rows: Empty rows in the order in which they begin; those of one prompt stand together.
        """
        waiting = deque(rows)
        held: list[Row] = []
        while waiting or held:
            parts = [self._decoder.step([row.ids[-1] for row in held])] if held else []
            joining = self._next(waiting, held)
            if joining:
                parts.append(self._join(joining))
                held += joining
            self._draw(held, parts[0] if len(parts) == 1 else torch.cat(parts))
            held = self._leave(held)

    def _next(self, waiting: deque[Row], held: Sequence[Row]) -> list[Row]:
        """Take from those who wait as many as there is room for."""
        room = self._slots - len(held) if self._decoder.rows_join or not held else 0
        known = {row.number for row in held}
        cached = sum(len(self._prompts[number]) for number in known) + len(held) * self._sampling.max_tokens
        fed = 0
        joining: list[Row] = []
        while waiting and len(joining) < room:
            number = waiting[0].number
            cached += self._sampling.max_tokens + (0 if number in known else len(self._prompts[number]))
            if (held or joining) and self._max_cached_tokens is not None and cached > self._max_cached_tokens:
                break
            if number not in known:
                fed += len(self._prompts[number])
                if joining and (not self._decoder.mixes_prompts or self._is_much(fed)):
                    break
                known.add(number)
            joining.append(waiting.popleft())
        return joining

    def _is_much(self, tokens: int) -> bool:
        """Tell whether prompts of so many tokens had better go through the model in parts."""
        return self._decoder.rows_join and tokens > _PROMPT_TOKENS_AT_ONCE

    def _join(self, rows: Sequence[Row]) -> Tensor:
        """Let rows begin; returns the logits [len(rows), V] of their first tokens."""
        logits = self._decoder.join([row.number for row in rows])
        if self._sampler is None:
            self._sampler = TokenSampler(self._sampling, device=logits.device)
        self._sampler.join([self._prompts[row.number] for row in rows], [row.seed for row in rows])
        return logits

    def _draw(self, held: Sequence[Row], logits: Tensor) -> None:
        """Append a token to every row that goes on."""
        assert self._sampler is not None
        # A plain copy would wait for the device.
        positions = torch.tensor([len(row.ids) for row in held]).to(logits.device, non_blocking=True)
        tokens, logps = self._sampler.draw(logits, positions)
        going = []
        for row, token, logp in zip(held, tokens.tolist(), logps.tolist(), strict=True):
            if row.finish_reason is None:
                row.append(token, logp)
                going.append(row)
        for row, stopped in zip(going, self._stops.ended([row.ids for row in going]), strict=True):
            if stopped:
                row.finish_reason = FinishReason.STOP
            elif len(row.ids) == self._sampling.max_tokens:
                row.finish_reason = FinishReason.LENGTH
            if row.finish_reason is not None:
                self._on_finished(row)
        self._on_progress(len(going))

    def _leave(self, held: list[Row]) -> list[Row]:
        """Let finished rows leave if that is worth it; the rows behind take their places."""
        going = [place for place, row in enumerate(held) if row.finish_reason is None]
        if not going and not self._decoder.rows_join:
            self._sampler = None
            return []
        if len(going) >= self._decoder.full_enough * len(held):
            return held
        places = _closed_up(going)
        self._decoder.keep(places)
        assert self._sampler is not None
        self._sampler.keep(places)
        return [held[place] for place in places]


def _closed_up(going: Sequence[int]) -> list[int]:
    """Fill the first places: with the row that is there, or, where that has finished, with the last one that goes on."""
    staying = set(going)
    behind = [place for place in going if place >= len(going)]
    return [place if place in staying else behind.pop() for place in range(len(going))]
