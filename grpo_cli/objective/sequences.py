"""Sums over sequences in the flat layout: K tokens of N sequences stand one after another, no padding."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """Which token belongs to which sequence.

    The sums run in a fixed order on CPU, and on CUDA with `torch.use_deterministic_algorithms`.

    Attributes:
        index: int64 [K], 0..N-1.
        lengths: float [N], tokens of each sequence; 0 where none takes part in the loss.
    """

    index: Tensor
    lengths: Tensor

    @classmethod
    def count(cls, index: Tensor, *, number: int, dtype: torch.dtype) -> Self:
        """Count the tokens of each of `number` sequences.

        Args:
            index: int64 [K].
            number: How many sequences there are (N), those without a token included.
            dtype: Of the lengths, so that divisions keep the precision of what is divided.
        """
        ones = torch.ones(index.shape, dtype=dtype, device=index.device)
        return cls(index=index, lengths=ones.new_zeros(number).index_add(0, index, ones))

    @property
    def active(self) -> Tensor:
        """Bool [N]: sequences that have at least one token."""
        return self.lengths > 0

    def sum(self, values: Tensor) -> Tensor:
        """Add up tokens [K] to sequences [N]."""
        return values.new_zeros(self.lengths.shape).index_add(0, self.index, values)

    def mean(self, values: Tensor) -> Tensor:
        """Average tokens [K] over each sequence [N]; 0 for a sequence without tokens."""
        return self.sum(values) / self.lengths.clamp(min=1)

    def spread(self, values: Tensor) -> Tensor:
        """Give each token [K] the value of its sequence [N]."""
        # Not values[index]: its backward adds up in parallel, in no fixed order.
        return values.index_select(0, self.index)
