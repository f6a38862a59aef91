"""`two_part_attention` on GPUs: each part of all groups of a packed row in one call of the flash kernel for sequences of any lengths.

The parts and the way they are merged, forward and backward, are those of `two_part`. What attends to itself lies one after another
in a packed row as the kernel wants it (see `flash`); completions and the prompts that they attend to are brought together for the other
call. Nothing is repeated or filled up.

Letters: H heads, K key-value heads (K divides H), T queries, S keys, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from grpo_cli.flash import Sequences, merged
from grpo_cli.policy.two_part import Block, RowBlocks


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
            own=_sequences(blocks.own, device, causal=True),
            shared=_sequences(blocks.shared, device, causal=False) if blocks.shared else None,
            queries=queries,
            keys=keys,
        )


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
            outcome, all_sums = merged(output[row.queries], sums[:, row.queries], part, part_sums)
            output = output.index_copy(0, row.queries, outcome)
            sums = sums.index_copy(1, row.queries, all_sums)
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


def _sequences(blocks: Sequence[Block], device: torch.device, *, causal: bool) -> Sequences:
    queries, keys = (
        [side.stop - side.start for side in sides]
        for sides in zip(*((block.queries, block.keys) for block in blocks), strict=True)
    )
    return Sequences.of(queries, keys, device, causal=causal)


def _by_token(states: Tensor) -> Tensor:
    """View [1, H, T, D] as [T, H, D]."""
    return states[0].transpose(0, 1)


def _by_head(states: Tensor) -> Tensor:
    """View [T, H, D] as [1, H, T, D]."""
    return states.transpose(0, 1)[None]
