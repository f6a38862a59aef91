"""The fast decoder: a prompt's cache is held once for its group, and rows join and leave while others are being sampled.

It feeds the model tokens that transformers' own generation would not put side by side, so it is used only with models that
were seen to give the same logits that way (see `group_check`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from grpo_cli.rollout.local.decoder import forward_takes
from grpo_cli.rollout.local.group_cache import NAME, GroupCache
from grpo_cli.rollout.local.prompt_images import PromptImages


class GroupDecoder:
    """A decoder of which rows can join at any time. See `Decoder`.

    Args:
        model: A transformers causal language model inside `attending_by_groups`.
        prompts: What rows continue; none of them empty.
        slots: Most rows at once.
        max_tokens: Most tokens a row samples.
        images: Those of the prompts; None: there are none.
        flash: See `GroupCache`.

    Attributes:
        cache: Keys and values.
    """

    rows_join = True
    mixes_prompts = True
    full_enough = 1.0

    def __init__(
        self,
        model: Any,
        prompts: Sequence[Sequence[int]],
        *,
        slots: int,
        max_tokens: int,
        images: PromptImages | None = None,
        flash: bool = True,
    ) -> None:
        self._model = model
        self._prompts = prompts
        self._images = images
        self._starts: dict[int, int] = {}
        self._device: torch.device = model.get_input_embeddings().weight.device
        self._selects = forward_takes(model, "logits_to_keep")
        self._first_logits: dict[int, Tensor] = {}
        self._newest = -1
        self.cache = GroupCache(slots=slots, max_tokens=max_tokens, device=self._device, flash=flash)

    def join(self, numbers: Sequence[int]) -> Tensor:
        """Add rows, and feed the prompts of those whose group is new. See `Decoder.join`."""
        self._forget_all_but({*numbers, *self.cache.numbers})
        new = [number for number in dict.fromkeys(numbers) if number not in self._first_logits]
        if new:
            self._feed_prompts(new)
        self.cache.join(numbers)
        self._newest = numbers[-1]
        return torch.stack([self._first_logits[number] for number in numbers])

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Append one token to each row. See `Decoder.step`."""
        places = [
            [self._starts[number] + length]
            for number, length in zip(self.cache.numbers, self.cache.lengths, strict=True)
        ]
        self.cache.feed_rows()
        return self._feed(torch.tensor(tokens)[:, None], torch.tensor(places))[:, -1]

    def keep(self, places: Sequence[int]) -> None:
        """Go on with some of the rows. See `Decoder.keep`."""
        self.cache.keep(places)
        # More rows of the newest prompt may be waiting, for those of one prompt come one after another.
        self._forget_all_but({*self.cache.numbers, self._newest})

    def _forget_all_but(self, needed: set[int]) -> None:
        """Drop what is kept of other prompts."""
        self.cache.forget_prompts(needed)
        self._first_logits = {number: self._first_logits[number] for number in self._first_logits.keys() & needed}

    def _feed_prompts(self, numbers: Sequence[int]) -> None:
        """Run prompts through the model in one row without padding."""
        prompts = [self._prompts[number] for number in numbers]
        lengths = [len(prompt) for prompt in prompts]
        images = self._images
        both_ways = {} if images is None else {number: images.both_ways(number) for number in numbers}
        self.cache.feed_prompts(dict(zip(numbers, lengths, strict=True)), both_ways)
        ids = torch.tensor([token for prompt in prompts for token in prompt])
        ends = torch.tensor(lengths).cumsum(dim=0).to(self._device) - 1
        arguments = {} if images is None else images.encoded(numbers)
        if self._selects:
            arguments["logits_to_keep"] = ends
        logits = self._feed(ids[None], self._positions(numbers), **arguments)[0]
        if len(logits) > len(ends):
            logits = logits[ends]
        self._first_logits.update(zip(numbers, logits.unbind(), strict=True))

    def _positions(self, numbers: Sequence[int]) -> Tensor:
        """Give the rotary positions of prompts in one row, [1, T] or [A, 1, T], and note where those of completions start."""
        images = self._images
        parts = [
            torch.arange(len(self._prompts[number]))[None] if images is None else images.positions(number)
            for number in numbers
        ]
        self._starts.update((number, int(part.max()) + 1) for number, part in zip(numbers, parts, strict=True))
        row = torch.cat(parts, dim=1)
        return row if len(row) == 1 else row[:, None]

    def _feed(self, ids: Tensor, positions: Tensor, **arguments: Any) -> Tensor:
        """Run tokens through the model and return its logits: [*ids.shape, V], or those that were asked for."""
        logits: Tensor = self._model(
            # Plain copies would wait for the device.
            input_ids=ids.to(self._device, non_blocking=True),
            position_ids=positions.to(self._device, non_blocking=True),
            use_cache=False,
            group_cache=self.cache,
            **arguments,
        ).logits
        return logits


@contextmanager
def attending_by_groups(model: Any) -> Iterator[None]:
    """Let a model attend through the group cache, and put its own attention back afterwards. What encodes images keeps its own.

    Raises:
        ValueError: If its attention cannot be exchanged.
    """
    before = _implementations(model.config)
    text = model.config.get_text_config()
    wanted = {name: NAME for name in model.config.sub_configs if getattr(model.config, name, None) is text}
    wanted = wanted or dict.fromkeys(before, NAME)
    try:
        model.set_attn_implementation(wanted)
        if not wanted.items() <= _implementations(model.config).items():
            raise ValueError("its attention cannot be exchanged")
        yield
    finally:
        model.set_attn_implementation({name: own for name, own in before.items() if own is not None})
        # The call takes no None, which parts have that are no model (MPT) or that are not there (Moshi).
        model.config._attn_implementation = before  # noqa: SLF001  there is no public name


def _implementations(config: Any) -> dict[str, str | None]:
    """Attention of a model, under "", and of each part with a config of its own, as transformers sets them."""
    parts = {"": config, **{name: getattr(config, name, None) for name in config.sub_configs}}
    return {name: part._attn_implementation for name, part in parts.items() if part is not None}  # noqa: SLF001
