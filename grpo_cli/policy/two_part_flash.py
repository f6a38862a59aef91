"""`two_part_attention` on GPUs: each part of all groups of a packed row in one call of the flash kernel for sequences of any lengths.

The parts and the way they are merged, forward and backward, are those of `two_part`. What attends to itself lies one after another
in a packed row as the kernel wants it; completions and the prompts that they attend to are brought together for the other call. Heads
share keys and values inside the kernel (Dao 2023, section 3.1.2), so nothing is repeated or filled up.

Letters: H heads, K key-value heads (K divides H), T queries, S keys, D head size, N sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from grpo_cli.policy.two_part import Block, RowBlocks

_LARGEST_HEAD = 256
_HEADS_IN_STEPS_OF = 8
_AMPERE = (8, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """Sequences of queries, and of the keys that each attends to, one after another.

    Attributes:
        query_starts: int32 [N + 1], where each begins and the last ends.
        key_starts: int32 [N + 1], the same of the keys.
        most_queries: Of one sequence.
        most_keys: Of one sequence.
        causal: Whether each query attends to keys up to itself; if not, to all.
    """

    query_starts: Tensor
    key_starts: Tensor
    most_queries: int
    most_keys: int
    causal: bool

    @classmethod
    def of(cls, blocks: Sequence[Block], device: torch.device, *, causal: bool) -> Self:
        """Line up blocks."""
        queries, keys = ([one.stop - one.start for one in side] for side in zip(*map(_sides, blocks), strict=True))
        query_starts, key_starts = (
            torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device) for lengths in (queries, keys)
        )
        return cls(
            query_starts=query_starts,
            key_starts=key_starts,
            most_queries=max(queries),
            most_keys=max(keys),
            causal=causal,
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> tuple[Tensor, Tensor]:
        """Give the outcome [T, H, D] of queries [T, H, D] with keys and values [S, K, D], and log-sum-exps float32 [H, T]."""
        outcome: tuple[Tensor, ...] = torch.ops.aten._flash_attention_forward(  # noqa: SLF001  torch's public call has no gradient that knows of another part
            query, key, value, *self._lengths, 0.0, self.causal, return_debug_mask=False, scale=scaling
        )
        return outcome[0], outcome[1]

    def attend_backward(
        self,
        gradient: Tensor,
        states: tuple[Tensor, Tensor, Tensor],
        output: Tensor,
        sums: Tensor,
        scaling: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Give the gradients of queries, keys and values, from that of an outcome and its log-sum-exps, both of the whole."""
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=output.device), output.new_empty(0)
        gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(  # noqa: SLF001
            gradient, *states, output, sums, *self._lengths, 0.0, self.causal, *no_dropout, scale=scaling
        )
        return gradients

    @property
    def _lengths(self) -> tuple[Tensor, Tensor, int, int]:
        return self.query_starts, self.key_starts, self.most_queries, self.most_keys


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSequences:
    """The attention of a packed row (see `RowBlocks`).

    Attributes:
        keys_before: Keys before the row's own.
        own: What attends to itself: all queries in their order, and all keys but those before.
        shared: Completions and their prompts; None: there are no completions.
        queries: int64 [shared queries], their places in the row.
        keys: int64 [shared keys], the places of the prompts' keys.
    """

    keys_before: int
    own: Sequences
    shared: Sequences | None
    queries: Tensor
    keys: Tensor

    @classmethod
    def of(cls, blocks: RowBlocks, device: torch.device, *, keys_before: int) -> Self:
        """Line up the blocks of a row."""
        queries, keys = (
            torch.tensor([place for one in side for place in range(one.start, one.stop)], dtype=torch.long).to(device)
            for side in (tuple(block.queries for block in blocks.shared), tuple(block.keys for block in blocks.shared))
        )
        return cls(
            keys_before=keys_before,
            own=Sequences.of(blocks.own, device, causal=True),
            shared=Sequences.of(blocks.shared, device, causal=False) if blocks.shared else None,
            queries=queries,
            keys=keys,
        )


def takes(query: Tensor) -> bool:
    """Tell whether the kernel computes for queries [.., D] like these, where they are."""
    return computes(query.dtype, query.shape[-1]) and has_kernel(query.device)


def computes(dtype: torch.dtype, head_size: int) -> bool:
    """Tell whether the kernel computes in a type, with heads of a size."""
    return (
        dtype in (torch.bfloat16, torch.float16) and head_size % _HEADS_IN_STEPS_OF == 0 and head_size <= _LARGEST_HEAD
    )


@cache
def has_kernel(device: torch.device) -> bool:
    """Tell whether a device has the kernel: NVIDIA's GPUs from Ampere on."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.backends.cuda.is_flash_attention_available():
        return False
    return torch.cuda.get_device_capability(device) >= _AMPERE


def two_part_flash_attention(
    query: Tensor, key: Tensor, value: Tensor, sequences: RowSequences, scaling: float | None
) -> Tensor:
    """Attend to both parts on a GPU.

    Args:
        query: float [1, H, T, D], in half precision.
        key: float [1, K, S, D].
        value: float [1, K, S, D].
        sequences: Who attends to what.
        scaling: Of the scores; None: one over the square root of D.

    Returns:
        float [1, H, T, D], in memory as [1, T, H, D].
    """
    outcome: Tensor = _TwoPartFlash.apply(query, key, value, sequences, scaling)  # type: ignore[no-untyped-call]
    return outcome


class _TwoPartFlash(torch.autograd.Function):
    """Nothing that a kernel gave is written into: selective checkpointing keeps that, and gives it out again."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, row: RowSequences, scaling: float | None
    ) -> Tensor:
        queries, keys, values = _by_token(query), _by_token(key), _by_token(value)
        output, sums = row.own.attend(queries, keys[row.keys_before :], values[row.keys_before :], scaling)
        if row.shared is not None:
            part, part_sums = row.shared.attend(queries[row.queries], keys[row.keys], values[row.keys], scaling)
            own, own_sums = output[row.queries].to(sums.dtype), sums[:, row.queries]
            share = (part_sums - own_sums).sigmoid().T[..., None]  # the prompt's, of the softmax's denominator
            output = output.index_copy(0, row.queries, own.lerp_(part.to(sums.dtype), share).to(output.dtype))
            sums = sums.index_copy(1, row.queries, torch.logaddexp(own_sums, part_sums))
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.row, ctx.scaling = row, scaling
        return output.transpose(0, 1)[None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        row: RowSequences = ctx.row
        query, key, value, output, sums = ctx.saved_tensors
        gradient, queries, keys, values = (_by_token(states) for states in (gradient, query, key, value))
        states = queries, keys[row.keys_before :], values[row.keys_before :]
        of_query, own_key, own_value = row.own.attend_backward(gradient, states, output, sums, ctx.scaling)
        if row.shared is None:
            return _by_head(of_query), _by_head(own_key), _by_head(own_value), None, None
        # A prompt's own tokens and the completions add to its gradient in full precision.
        of_key, of_value = (torch.zeros(keys.shape, dtype=sums.dtype, device=keys.device) for _ in range(2))
        of_key[row.keys_before :] = own_key
        of_value[row.keys_before :] = own_value
        shared = row.shared.attend_backward(
            gradient[row.queries],
            (queries[row.queries], keys[row.keys], values[row.keys]),
            output[row.queries],
            sums[:, row.queries],
            ctx.scaling,
        )
        of_query.index_add_(0, row.queries, shared[0])
        of_key.index_add_(0, row.keys, shared[1].to(sums.dtype))
        of_value.index_add_(0, row.keys, shared[2].to(sums.dtype))
        return _by_head(of_query), _by_head(of_key.to(key.dtype)), _by_head(of_value.to(value.dtype)), None, None


def _sides(block: Block) -> tuple[slice, slice]:
    return block.queries, block.keys


def _by_token(states: Tensor) -> Tensor:
    """View [1, H, T, D] as [T, H, D]."""
    return states[0].transpose(0, 1)


def _by_head(states: Tensor) -> Tensor:
    """View [T, H, D] as [1, H, T, D]."""
    return states.transpose(0, 1)[None]
