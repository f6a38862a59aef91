"""Attention over a packed row in blocks without masks: exact, with the memory and the speed of a flash kernel.

A completion's token attends to its prompt, all of it, and to its own completion up to itself. Each part is one kernel call
without a mask; the two outcomes are merged by their log-sum-exps. The backward calls each part's kernel with the *merged*
output and log-sum-exp, which gives exact gradients, as in ring attention (Liu et al. 2023, section 3).

Letters: H heads, K key-value heads (K divides H), T queries, S keys, D head size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from grpo_cli.policy.layout import SharedPrefix

_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001  torch has no public call with log-sum-exps
_attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Queries that attend to keys: to all of them, or, with `causal`, each to those up to itself."""

    queries: slice
    keys: slice
    causal: bool

    @classmethod
    def of(cls, start: int, length: int, *, keys_before: int) -> Self:
        """Tokens that attend to themselves; `start` counts keys."""
        own = slice(start, start + length)
        return cls(queries=slice(own.start - keys_before, own.stop - keys_before), keys=own, causal=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowBlocks:
    """The attention of a packed row. Every query is in one block of `own` and in at most one of `shared`."""

    own: tuple[Block, ...]
    shared: tuple[Block, ...]

    @classmethod
    def of(cls, prefixes: Sequence[SharedPrefix], *, keys_before: int = 0) -> Self:
        """Divide a row.

        Args:
            prefixes: Its layout.
            keys_before: Keys before the row: those of the one prompt that is not in it.
        """
        own: list[Block] = []
        shared: list[Block] = []
        for prefix in prefixes:
            if not keys_before:
                own.append(Block.of(prefix.start, prefix.length, keys_before=0))
            own += [Block.of(start, length, keys_before=keys_before) for start, length in prefix.completions]
            if prefix.completions:
                first, (last, length) = prefix.completions[0][0], prefix.completions[-1]
                queries = slice(first - keys_before, last + length - keys_before)
                prompt = slice(prefix.start, prefix.start + prefix.length)
                shared.append(Block(queries=queries, keys=prompt, causal=False))
        return cls(own=tuple(own), shared=tuple(shared))

    def __iter__(self) -> Iterator[Block]:
        yield from self.own
        yield from self.shared


def two_part_attention(query: Tensor, key: Tensor, value: Tensor, blocks: RowBlocks, scaling: float | None) -> Tensor:
    """Attend block by block on a CPU.

    Args:
        query: float [1, H, T, D].
        key: float [1, K, S, D].
        value: float [1, K, S, D].
        blocks: Who attends to what.
        scaling: Of the scores; None: one over the square root of D.

    Returns:
        float [1, H, T, D], in memory as [1, T, H, D].
    """
    outcome: Tensor = _TwoPart.apply(query, key, value, blocks, scaling)  # type: ignore[no-untyped-call]
    return outcome


class _TwoPart(torch.autograd.Function):
    """Heads that share keys and values are an axis of their own, along which these are expanded without a copy: [K, H/K, ., D]."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: RowBlocks, scaling: float | None
    ) -> Tensor:
        output = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        queries, keys, values = _by_key_head(query, key, value)
        outputs = _by_groups(output, key.shape[1])
        sums: Tensor | None = None
        for block in blocks.own:
            part, part_sums = _attend(*_parts(block, queries, keys, values), 0.0, block.causal, scale=scaling)
            if sums is None:
                sums = part_sums.new_empty(queries.shape[:3])
            outputs[:, :, block.queries] = part
            sums[:, :, block.queries] = part_sums
        assert sums is not None
        for block in blocks.shared:
            part, part_sums = _attend(*_parts(block, queries, keys, values), 0.0, block.causal, scale=scaling)
            own, own_sums = outputs[:, :, block.queries], sums[:, :, block.queries]
            share = (part_sums - own_sums).sigmoid_()[..., None]  # the prompt's, of the softmax's denominator
            own.copy_(own.to(sums.dtype).lerp_(part.to(sums.dtype), share))  # in float32 that is in place
            torch.logaddexp(own_sums, part_sums, out=own_sums)
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.blocks, ctx.scaling = blocks, scaling
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, sums = ctx.saved_tensors
        queries, keys, values = _by_key_head(query, key, value)
        gradients, outputs = (_by_groups(states, key.shape[1]) for states in (gradient, output))
        query_gradient = torch.empty_like(queries)
        # Summed in full precision over all the completions that share a prompt.
        key_gradient = torch.zeros(key.shape[1:], dtype=sums.dtype, device=key.device)
        value_gradient = torch.zeros_like(key_gradient)
        for number, block in enumerate(blocks := ctx.blocks):
            of_query, of_key, of_value = _attend_backward(
                gradients[:, :, block.queries],
                *_parts(block, queries, keys, values),
                outputs[:, :, block.queries],
                sums[:, :, block.queries],
                0.0,
                block.causal,
                scale=ctx.scaling,
            )
            if number < len(blocks.own):
                query_gradient[:, :, block.queries] = of_query
            else:
                query_gradient[:, :, block.queries] += of_query
            key_gradient[:, block.keys] += of_key.sum(1)
            value_gradient[:, block.keys] += of_value.sum(1)
        return (
            query_gradient.flatten(0, 1)[None],
            key_gradient[None].to(key.dtype),
            value_gradient[None].to(value.dtype),
            None,
            None,
        )


def _by_key_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views [K, H/K, ., D] of all three."""
    queries = _by_groups(query, key.shape[1])
    keys, values = (states[0][:, None].expand(-1, queries.shape[1], -1, -1) for states in (key, value))
    return queries, keys, values


def _by_groups(states: Tensor, key_heads: int) -> Tensor:
    """View [1, H, T, D] as [K, H/K, T, D]."""
    return states[0].view(key_heads, -1, *states.shape[2:])


def _parts(block: Block, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return queries[:, :, block.queries], keys[:, :, block.keys], values[:, :, block.keys]
