"""The two operations of the flash kernel for sequences of any lengths, by their definition: one sequence after another."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_cli import flash

FORWARD, BACKWARD = "_flash_attention_forward", "_flash_attention_backward"


@dataclass(frozen=True, kw_only=True, slots=True)
class OneSequence:
    """A sequence of the kernel's arguments, by head: queries [H, T, D], keys and values [H, S, D]; `mask` [T, S]."""

    queries: slice
    keys: slice
    mask: Tensor


def sequences(
    query_starts: Tensor, key_starts: Tensor, *, causal: bool, used_keys: Tensor | None = None
) -> Iterator[OneSequence]:
    spans = (zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True) for starts in (query_starts, key_starts))
    for number, (queries, keys) in enumerate(zip(*spans, strict=True)):
        rows = queries[1] - queries[0]
        columns = keys[1] - keys[0] if used_keys is None else int(used_keys[number])
        assert columns <= keys[1] - keys[0]
        mask = torch.ones(rows, columns, dtype=torch.bool)
        yield OneSequence(
            queries=slice(*queries),
            keys=slice(keys[0], keys[0] + columns),
            mask=mask.tril(columns - rows) if causal else mask,
        )


def heads_first(query: Tensor, *states: Tensor) -> Iterator[Tensor]:
    for one in (query, *states):
        yield one.repeat_interleave(query.shape[1] // one.shape[1], dim=1).transpose(0, 1)


def forward_by_definition(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    most_queries: int,
    most_keys: int,
    dropout: float,
    causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    seqused_k: Tensor | None = None,
    **_unused: None,
) -> tuple[Tensor, ...]:
    assert dropout == 0
    assert not return_debug_mask
    assert most_queries == query_starts.diff().max()
    assert most_keys == (key_starts.diff() if seqused_k is None else seqused_k).max()
    queries, keys, values = heads_first(query, key, value)
    output, sums = torch.full_like(queries, torch.nan), queries.new_full(queries.shape[:2], torch.nan)
    for one in sequences(query_starts, key_starts, causal=causal, used_keys=seqused_k):
        scores = queries[:, one.queries] @ keys[:, one.keys].transpose(1, 2) * (scale or query.shape[-1] ** -0.5)
        scores = scores.masked_fill(~one.mask, -torch.inf)
        output[:, one.queries] = scores.softmax(-1) @ values[:, one.keys]
        sums[:, one.queries] = scores.logsumexp(-1)
    nothing = query.new_empty(0)
    return output.transpose(0, 1).contiguous(), sums, nothing, nothing.clone(), nothing.clone()


def backward_by_definition(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    most_queries: int,
    most_keys: int,
    dropout: float,
    causal: bool,
    _seed: Tensor,
    _unused: Tensor,
    *,
    scale: float | None = None,
    **_windows: None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Dao et al. 2022, algorithm 4, without tiles."""
    assert dropout == 0
    assert most_queries == query_starts.diff().max()
    assert most_keys == key_starts.diff().max()
    queries, keys, values = heads_first(query, key, value)
    gradients, outputs = heads_first(gradient, output)
    of_query, of_key, of_value = (torch.zeros_like(one) for one in (queries, keys, values))
    scaling = scale or query.shape[-1] ** -0.5
    for one in sequences(query_starts, key_starts, causal=causal):
        scores = queries[:, one.queries] @ keys[:, one.keys].transpose(1, 2) * scaling
        weights = (scores - sums[:, one.queries, None]).exp() * one.mask
        of_value[:, one.keys] += weights.transpose(1, 2) @ gradients[:, one.queries]
        of_weights = gradients[:, one.queries] @ values[:, one.keys].transpose(1, 2)
        row_sums = (gradients[:, one.queries] * outputs[:, one.queries]).sum(-1, keepdim=True)
        of_scores = weights * (of_weights - row_sums) * scaling
        of_query[:, one.queries] += of_scores @ keys[:, one.keys]
        of_key[:, one.keys] += of_scores.transpose(1, 2) @ queries[:, one.queries]

    def by_key_head(states: Tensor) -> Tensor:
        return states.view(key.shape[1], -1, *states.shape[1:]).sum(1).transpose(0, 1)

    return of_query.transpose(0, 1), by_key_head(of_key), by_key_head(of_value)


@contextmanager
def flash_by_definition(*, in_any_type: bool = False) -> Iterator[None]:
    """Give CPUs the kernel's two operations; they have neither, so nothing is replaced. `in_any_type`: also where it is too coarse to compare."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl(FORWARD, forward_by_definition, "CPU")
    library.impl(BACKWARD, backward_by_definition, "CPU")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash, "has_kernel", lambda _device: True)
        if in_any_type:
            patch.setattr(flash, "computes", lambda _dtype, _size: True)
        yield
    library._destroy()
