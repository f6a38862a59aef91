"""Keys and values of the groups being sampled, and the attention that reads them.

A prompt's keys and values are held once for all rows of its group, which attend to them in one matrix product per layer. What a
row has sampled itself stands in its slot of a buffer that is written in place.

It plugs into transformers models as an attention function under a name of its own; the cache travels to it as a keyword
argument of the model's forward. No mask function has that name, so the models build no masks.

Letters: R rows, S slots, K heads of keys and values, N query heads to each of them, D head size, P prompt tokens, W tokens of
the row that has sampled most, C tokens a slot has room for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

# Transformers would look for a kernel on the hub if "flash" or a slash were in the name.
NAME = "grpo_group_cache"

_LARGEST_FLASH_HEAD = 256
"""Numbers of the largest head that a GPU's flash kernel computes with, in half precision; it alone lets heads share keys."""

_FIRST_CAPACITY = 128
"""Tokens that a slot has room for at first; the room doubles when a row needs more."""


def group_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001  the cache knows what sees what
    *,
    group_cache: "GroupCache | None" = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **arguments: Any,  # noqa: ARG001  what else transformers passes
) -> tuple[Tensor, None]:
    """Attend as the cache says: prompts to themselves, a row's newest token to its prompt and to what the row has sampled.

    Args:
        module: The attention layer.
        query: float [B, K * N, T, D], rotated: B = 1 row of T packed prompt tokens, or B = R rows of T = 1 token.
        key: float [B, K, T, D].
        value: float [B, K, T, D].
        attention_mask: Ignored.
        group_cache: What was fed before, and what is fed now; None: the model kept it to itself.
        scaling: Of the scores.
        softcap: Bound of the scores; must be None.
        s_aux: Attention sinks; must be None.
        **arguments: Ignored; a window is, too: see `LocalEngine`.

    Returns:
        float [B, T, K * N, D], and None for the attention weights.

    Raises:
        NotImplementedError: If there is no cache, or the layer does more to its scores than scaling them, which a few tokens
            might not show.
    """
    if group_cache is None:
        raise NotImplementedError("its forward passes no arguments on to its attention")
    if softcap is not None:
        raise NotImplementedError("its attention bounds the scores (softcap)")
    if s_aux is not None:
        raise NotImplementedError("its attention has sinks")
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    # Under autocast the projections are in a reduced type, and rotating may have brought query and key back to float32.
    query, key = query.to(value.dtype), key.to(value.dtype)
    with torch.autocast(query.device.type, enabled=False):
        return group_cache.attend(module, query, key, value, scaling), None


class GroupCache:
    """See the module.

    Before each forward, `feed_prompts` or `feed_rows` says what goes through the model.

    Args:
        slots: Most rows at once (S).
        max_tokens: Most tokens a row samples.
        device: Where the model is.

    Attributes:
        numbers: Which group each row belongs to.
        lengths: Tokens of each row in the cache, its prompt not counted.
    """

    def __init__(self, *, slots: int, max_tokens: int, device: torch.device) -> None:
        self.numbers: list[int] = []
        self.lengths: list[int] = []
        self._slots = slots
        self._max_tokens = max_tokens
        self._device = device
        self._layers: dict[int, _Layer] = {}
        self._prompts: dict[int, _FedPrompt] = {}
        self._rows: _Rows | None = None
        self._arrangement: _Arrangement | None = None

    def feed_prompts(
        self, lengths: Mapping[int, int], both_ways: Mapping[int, Sequence[tuple[int, int]]] | None = None
    ) -> None:
        """Announce a packed row of prompts: one after another, without padding.

        Args:
            lengths: Tokens of each prompt by the number of its group.
            both_ways: First token and number of those that see all of each other, such as an image's, in each prompt that has some.
        """
        self._rows, start = None, 0
        self._prompts = {}
        for number, length in lengths.items():
            runs = both_ways.get(number, ()) if both_ways is not None else ()
            mask = _mask(length, runs, self._device) if runs else None
            self._prompts[number] = _FedPrompt(span=slice(start, start + length), mask=mask)
            start += length

    def join(self, numbers: Sequence[int]) -> None:
        """Add empty rows at the end.

        Args:
            numbers: The group of each; its prompt has been fed.
        """
        self.numbers.extend(numbers)
        self.lengths.extend(0 for _ in numbers)
        self._arrangement = None

    def feed_rows(self) -> None:
        """Announce one token for each row."""
        if self._arrangement is None:
            self._arrangement = _arrange(self.numbers, self._device)
        width = max(self.lengths) + 1
        lengths = torch.tensor(self.lengths, device=self._device)
        bias = None
        if min(self.lengths) + 1 < width:
            unwritten = torch.arange(width, device=self._device) > lengths[:, None]
            bias = torch.zeros(unwritten.shape, device=self._device).masked_fill_(unwritten, -torch.inf)[:, None, None]
        numbers = torch.arange(len(lengths), device=self._device)
        self._rows = _Rows(width=width, numbers=numbers, lengths=lengths, bias=bias, arrangement=self._arrangement)
        for layer in self._layers.values():
            layer.reserve(self._slots, width, self._max_tokens)
        self.lengths = [length + 1 for length in self.lengths]

    def keep(self, places: Sequence[int]) -> None:
        """Go on with some of the rows.

        Args:
            places: The row that each place is taken by; a row that moves moves to a place before its own.
        """
        moved = [(place, row) for place, row in enumerate(places) if place != row]
        if moved:
            targets, sources = torch.tensor(moved, device=self._device).unbind(dim=1)
            width = max(self.lengths[row] for _, row in moved)
            for layer in self._layers.values() if width else ():
                layer.move(targets, sources, width)
        self.numbers = [self.numbers[row] for row in places]
        self.lengths = [self.lengths[row] for row in places]
        self._arrangement = None

    def forget_prompts(self, needed: set[int]) -> None:
        """Drop the keys and values of all prompts but those needed."""
        for layer in self._layers.values():
            for number in layer.prompts.keys() - needed:
                del layer.prompts[number]

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Take in a layer's keys and values and attend to all that the queries see. See `group_attention`."""
        index = cast("int", module.layer_idx)  # transformers numbers its attention layers
        if self._rows is None:
            layer = self._layers.setdefault(index, _Layer())
            return layer.attend_prompts(query, key, value, scaling, self._prompts)
        return self._layers[index].attend_rows(query.float() * scaling, key, value, self._rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class _FedPrompt:
    """A prompt in a packed row.

    Attributes:
        span: Its tokens.
        mask: bool [P, P], what each of its tokens sees; None: itself and those before.
    """

    span: slice
    mask: Tensor | None


def _mask(length: int, both_ways: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """Say what each token of a prompt sees, bool [P, P]: those before, and all of its own run."""
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    for start, count in both_ways:
        mask[start : start + count, start : start + count] = True
    return mask


@dataclass(frozen=True, kw_only=True, slots=True)
class _Arrangement:
    """Rows in the order of their groups.

    Attributes:
        order: int64 [R], rows group by group; None if they stand so already.
        back: int64 [R], the place of each row in that order.
        groups: Number, first and last + 1 place of each group.
    """

    order: Tensor | None
    back: Tensor
    groups: tuple[tuple[int, int, int], ...]


def _arrange(numbers: Sequence[int], device: torch.device) -> _Arrangement:
    """Sort rows by their groups' numbers."""
    order = sorted(range(len(numbers)), key=numbers.__getitem__)
    groups, start = [], 0
    while start < len(order):
        number = numbers[order[start]]
        end = start + numbers.count(number)
        groups.append((number, start, end))
        start = end
    back = sorted(range(len(order)), key=order.__getitem__)
    return _Arrangement(
        order=None if order == list(range(len(order))) else torch.tensor(order, device=device),
        back=torch.tensor(back, device=device),
        groups=tuple(groups),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
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
    arrangement: _Arrangement


@dataclass(slots=True)
class _Layer:
    """What one layer keeps.

    Attributes:
        prompts: Keys and values [K, P, D] of each prompt by the number of its group.
        key: [S, K, C, D], what rows have sampled.
        value: [S, K, C, D].
    """

    prompts: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    key: Tensor = field(default_factory=lambda: torch.empty(0))
    value: Tensor = field(default_factory=lambda: torch.empty(0))

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
        prompts: Mapping[int, _FedPrompt],
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

    def attend_rows(self, query: Tensor, key: Tensor, value: Tensor, rows: _Rows) -> Tensor:
        """Append each row's newest token and attend to what the row sees: [R, 1, K * N, D].

        The scores of a row's own tokens enter the softmax over its prompt as one more score, their log-sum-exp; its weight is
        the own tokens' share of the attention.
        """
        count, heads = query.shape[0], key.shape[1]
        self.key[rows.numbers, :, rows.lengths] = key[:, :, 0]
        self.value[rows.numbers, :, rows.lengths] = value[:, :, 0]
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
        return output.to(value.dtype).reshape(count, 1, -1, value.shape[-1])

    def _with_prompts(self, query: Tensor, own: Tensor, total: Tensor, arrangement: _Arrangement) -> Tensor:
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
    """Attention of a prompt to itself, [1, K * N, P, D]; `mask` as in `_FedPrompt`.

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

    Zeros, for what is not written yet is masked, and a masked score must be a number all the same.
    """
    buffer = like.new_zeros(slots, like.shape[0], room, like.shape[2])
    if held:
        buffer[:, :, :held] = states
    return buffer


AttentionInterface.register(NAME, group_attention)
