"""The flash kernel of PyTorch for sequences of any lengths, which also gives the log-sum-exps that partial attention is merged by.

Queries of several sequences stand one after another without padding, and so do their keys; heads share keys inside the kernel (Dao 2023,
section 3.1.2).

Letters: H heads, K key-value heads (K divides H), T queries, S keys, D head size, N sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

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
        used_keys: int32 [N], how many keys of each sequence count, from its first on; None: all. Not with a backward.
    """

    query_starts: Tensor
    key_starts: Tensor
    most_queries: int
    most_keys: int
    causal: bool = False
    used_keys: Tensor | None = None

    @classmethod
    def of(cls, queries: Sequence[int], keys: Sequence[int], device: torch.device, *, causal: bool = False) -> Self:
        """Line up sequences of these lengths."""
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
            query,
            key,
            value,
            *self._lengths,
            0.0,
            self.causal,
            return_debug_mask=False,
            scale=scaling,
            seqused_k=self.used_keys,
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


def merged(own: Tensor, own_sums: Tensor, other: Tensor, other_sums: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention to two parts of the keys.

    Args:
        own: [T, H, D], attention to one part.
        own_sums: float32 [H, T], log-sum-exps of its scores.
        other: [T, H, D], attention to the other part.
        other_sums: float32 [H, T].

    Returns:
        [T, H, D] in the type of the parts, and the log-sum-exps of all scores.
    """
    share = (other_sums - own_sums).sigmoid().T[..., None]  # the other's, of the softmax's denominator
    outcome = own.to(own_sums.dtype).lerp(other.to(own_sums.dtype), share).to(own.dtype)
    return outcome, torch.logaddexp(own_sums, other_sums)
