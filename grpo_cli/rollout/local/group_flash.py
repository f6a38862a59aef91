"""Attention of a step of all rows with the flash kernel of GPUs: one call for what rows have sampled, one for the prompts of all groups.

In half precision it reads keys and values as they are. Letters: see `group_cache`; the N query heads that share a head of keys are given to
the kernel as N queries of one head.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from grpo_cli.flash import Sequences, merged


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsByGroup:
    """Rows and the prompts that are held, as long as both stay the same.

    Attributes:
        prompts: The N queries of each row, group by group, and the prompts of these groups.
        order: int64 [R], rows group by group; None if they stand so already.
        back: int64 [R], the place of each row in that order.
    """

    prompts: Sequences
    order: Tensor | None
    back: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashStep:
    """A step of all rows, the same for every layer.

    Attributes:
        own: The N queries of each row, and what it has sampled, in slots of C tokens of which as many count as are written.
        groups: What rows attend to besides.
    """

    own: Sequences
    groups: RowsByGroup

    @classmethod
    def of(cls, lengths: Tensor, *, longest: int, repeats: int, room: int, groups: RowsByGroup) -> Self:
        """Prepare a step.

        Args:
            lengths: int64 [R], where each row's newest token goes.
            longest: Tokens of the longest row, its newest included.
            repeats: N.
            room: C.
            groups: What rows attend to besides.
        """
        rows, device = len(lengths), lengths.device
        places = torch.arange(rows + 1, dtype=torch.int32, device=device)
        own = Sequences(
            query_starts=places * repeats,
            key_starts=places * room,
            most_queries=repeats,
            most_keys=longest,
            used_keys=(lengths + 1).int(),
        )
        return cls(own=own, groups=groups)

    def attend(
        self, query: Tensor, own: tuple[Tensor, Tensor], prompts: tuple[Tensor, Tensor], scaling: float
    ) -> Tensor:
        """Attend to own tokens and prompts.

        Args:
            query: half precision [R, K, N, D].
            own: Keys and values, [R * C, K, D].
            prompts: Keys and values of the prompts that are held, [S, K, D].
            scaling: Of the scores.

        Returns:
            [R, K, N, D].
        """
        rows, heads, repeats, size = query.shape
        queries = query.transpose(1, 2).reshape(rows, -1)
        ordered = queries if self.groups.order is None else queries[self.groups.order]
        by_row, by_group = (states.view(rows * repeats, heads, size) for states in (queries, ordered))
        outcome, sums = self.own.attend(by_row, *own, scaling)
        other, other_sums = self.groups.prompts.attend(by_group, *prompts, scaling)
        if self.groups.order is not None:
            other = other.view(rows, -1)[self.groups.back].view_as(other)
            other_sums = other_sums.view(heads, rows, repeats)[:, self.groups.back].reshape_as(sums)
        outcome, _ = merged(outcome, sums, other, other_sums)
        return outcome.view(rows, repeats, heads, size).transpose(1, 2)
