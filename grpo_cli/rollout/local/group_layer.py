"""What one layer keeps of the groups being sampled, and its attention. Letters: see `group_cache`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from grpo_cli.flash import takes
from grpo_cli.rollout.local.group_flash import FlashStep

_LARGEST_FLASH_HEAD = 256
"""Numbers of the largest head that a GPU's flash kernel computes with, in half precision; it alone lets heads share keys."""

_FIRST_CAPACITY = 128
"""Tokens that a slot has room for at first; the room doubles when a row needs more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FedPrompt:
    """A prompt in a packed row.

    Attributes:
        span: Its tokens.
        mask: bool [P, P], what each of its tokens sees; None: itself and those before.
    """

    span: slice
    mask: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrangement:
    """Rows in the order of their groups.

    Attributes:
        order: int64 [R], rows group by group; None if they stand so already.
        back: int64 [R], the place of each row in that order.
        groups: Number, first and last + 1 place of each group.
    """

    order: Tensor | None
    back: Tensor
    groups: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """A step of all rows, the same for every layer.

    Attributes:
        width: Tokens of the longest row, its newest included (W).
        numbers: int64 [R], 0 .. R-1.
        lengths: int64 [R], where each row's newest token goes.
        bias: float32 [R, 1, 1, W], -inf at what a row has not sampled; None if all have sampled W.
        arrangement: The rows' groups.
    """

    width: int
    numbers: Tensor
    lengths: Tensor
    bias: Tensor | None
    arrangement: Arrangement


@dataclass(slots=True)
class Layer:
    """What one layer keeps.

    Attributes:
        prompts: Keys and values [K, P, D] of each prompt by the number of its group.
        key: [S, K, C, D], what rows have sampled.
        value: [S, K, C, D].
        joined: Keys and values [all prompt tokens, K, D] of the prompts of these numbers, of which `prompts` are parts; for the flash kernel.
    """

    prompts: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    key: Tensor = field(default_factory=lambda: torch.empty(0))
    value: Tensor = field(default_factory=lambda: torch.empty(0))
    joined: tuple[list[int], tuple[Tensor, Tensor]] | None = None

    def reserve(self, slots: int, width: int, max_tokens: int) -> None:
        """Make room for `width` tokens in each slot."""
        held = self.key.shape[2] if self.key.ndim == 4 else 0
        if width <= held:
            return
        room = min(max(width, 2 * held, _FIRST_CAPACITY), max_tokens)
        prompt_key, prompt_value = next(iter(self.prompts.values()))
        self.key = _enlarged(self.key, held, like=prompt_key, slots=slots, room=room)
        self.value = _enlarged(self.value, held, like=prompt_value, slots=slots, room=room)

    def move(self, targets: Tensor, sources: Tensor, width: int) -> None:
        """Copy the first `width` tokens of some slots to others."""
        for states in (self.key, self.value):
            states[targets, :, :width] = states[sources, :, :width]

    def attend_prompts(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        prompts: Mapping[int, FedPrompt],
    ) -> Tensor:
        """Keep each prompt's keys and values, and attend to them: [1, T, K * N, D]."""
        outputs = []
        for number, prompt in prompts.items():
            own_key, own_value = key[:, :, prompt.span], value[:, :, prompt.span]
            # A clone, for a part of a tensor would keep all of it.
            kept = (states[0].clone(memory_format=torch.contiguous_format) for states in (own_key, own_value))
            self.prompts[number] = (next(kept), next(kept))
            outputs.append(_prompt_attention(query[:, :, prompt.span], own_key, own_value, prompt.mask, scaling))
        return torch.cat(outputs, dim=2).transpose(1, 2)

    def append(self, key: Tensor, value: Tensor, rows: Rows) -> None:
        """Keep the keys and values [R, K, 1, D] of each row's newest token."""
        self.key[rows.numbers, :, rows.lengths] = key[:, :, 0]
        self.value[rows.numbers, :, rows.lengths] = value[:, :, 0]

    def attend_with_flash(self, query: Tensor, step: FlashStep, scaling: float) -> Tensor:
        """Attend to what rows see, with queries [R, K * N, 1, D]: [R, 1, K * N, D]."""
        count, heads = query.shape[0], self.key.shape[1]
        own = self.key[:count].transpose(1, 2).flatten(0, 1), self.value[:count].transpose(1, 2).flatten(0, 1)
        queries = query.view(count, heads, -1, query.shape[-1])
        return step.attend(queries, own, self._joined_prompts(), scaling).reshape(count, 1, -1, own[1].shape[-1])

    def _joined_prompts(self) -> tuple[Tensor, Tensor]:
        """Put the prompts behind each other, and let go of what they were in before."""
        numbers = sorted(self.prompts)
        if self.joined is None or self.joined[0] != numbers:
            keys, values = (
                torch.cat([self.prompts[number][side].transpose(0, 1) for number in numbers]) for side in (0, 1)
            )
            lengths = [self.prompts[number][0].shape[1] for number in numbers]
            parts = zip(numbers, torch.split(keys, lengths), torch.split(values, lengths), strict=True)
            self.prompts = {number: (key.transpose(0, 1), value.transpose(0, 1)) for number, key, value in parts}
            self.joined = numbers, (keys, values)
        return self.joined[1]

    def attend_rows(self, query: Tensor, rows: Rows) -> Tensor:
        """Attend to what rows see, with queries float32 [R, K * N, 1, D], scaled: [R, 1, K * N, D].

        The scores of a row's own tokens enter the softmax over its prompt as one more score, their log-sum-exp; its weight is
        the own tokens' share of the attention.
        """
        count, heads = query.shape[0], self.key.shape[1]
        query = query.reshape(count, heads, -1, query.shape[-1])
        scores = query @ self.key[:count, :, : rows.width].float().transpose(-1, -2)
        if rows.bias is not None:
            scores += rows.bias
        largest = scores.amax(dim=-1, keepdim=True)
        weights = (scores - largest).exp_()
        mass = weights.sum(dim=-1, keepdim=True)
        own = weights @ self.value[:count, :, : rows.width].float() / mass
        total = largest + mass.log()
        output = self._with_prompts(query, own, total, rows.arrangement)
        return output.to(self.value.dtype).reshape(count, 1, -1, self.value.shape[-1])

    def _with_prompts(self, query: Tensor, own: Tensor, total: Tensor, arrangement: Arrangement) -> Tensor:
        """Merge attention to own tokens with attention to the prompts.

        Args:
            query: float32 [R, K, N, D], scaled.
            own: float32 [R, K, N, D], attention to own tokens.
            total: float32 [R, K, N, 1], log-sum-exp of the scores of own tokens.
            arrangement: The rows' groups.

        Returns:
            float32 [R, K, N, D].
        """
        rows, heads, repeats, _ = query.shape

        def by_heads(states: Tensor) -> Tensor:
            """[R, K, N, ...] in its own order to [K, R * N, ...] in the order of groups."""
            ordered = states if arrangement.order is None else states[arrangement.order]
            return ordered.transpose(0, 1).reshape(heads, rows * repeats, -1)

        query, own, total = by_heads(query), by_heads(own), by_heads(total)
        merged = torch.empty_like(own)
        for number, start, end in arrangement.groups:
            key, value = self.prompts[number]
            part = slice(start * repeats, end * repeats)
            scores = torch.bmm(query[:, part], key.float().transpose(1, 2))
            weights = torch.cat([scores, total[:, part]], dim=2).softmax(dim=-1)
            torch.baddbmm(own[:, part] * weights[:, :, -1:], weights[:, :, :-1], value.float(), out=merged[:, part])
        merged = merged.view(heads, rows, repeats, -1).transpose(0, 1)
        return merged if arrangement.order is None else merged[arrangement.back]


def _prompt_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Attention of a prompt to itself, [1, K * N, P, D]; `mask` as in `FedPrompt`.

    Where no kernel lets heads share keys, torch would compute with matrices of all scores, [K * N, P, P].
    """
    repeats = query.shape[1] // key.shape[1]
    flash = query.dtype.itemsize < torch.float32.itemsize and query.shape[-1] <= _LARGEST_FLASH_HEAD
    shared = repeats > 1 and mask is None and (query.device.type == "cpu" or flash)
    if repeats > 1 and not shared:
        key, value = (states.repeat_interleave(repeats, dim=1) for states in (key, value))
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=shared
    )


def _enlarged(states: Tensor, held: int, *, like: Tensor, slots: int, room: int) -> Tensor:
    """Give a buffer [S, K, room, D] that begins with what an older one holds.

    Zeros, for what is not written yet is masked, and a masked score must be a number all the same. What the flash kernel may be given has
    a token's heads side by side.
    """
    heads, size = like.shape[0], like.shape[2]
    if takes(like):
        buffer = like.new_zeros(slots, room, heads, size).transpose(1, 2)
    else:
        buffer = like.new_zeros(slots, heads, room, size)
    if held:
        buffer[:, :, :held] = states
    return buffer
