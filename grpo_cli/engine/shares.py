"""Who computes what: the completions of an optimizer step, cut into shares for the processes by the tokens they cost."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What completions cost that go through the model, in numbers that all processes have of all of them. R completions.

    Attributes:
        begins: bool [R], whether a completion is the first of its prompt's.
        prompts: int [R], tokens of its prompt.
        completions: int [R], its own tokens.
        active: bool [R], whether it goes through the model. The others cost nothing.
    """

    begins: Tensor
    prompts: Tensor
    completions: Tensor
    active: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class _Costs:
    """What the completions of a step cost that cost anything.

    Attributes:
        places: Where each stands among all completions of the step.
        alone: Tokens that each costs as the first of its process: those of its prompt, and its own.
        sums: Tokens of all up to and with each, in one process. The prompt of neighbours is fed once if it can be.
    """

    places: Sequence[int]
    alone: Sequence[int]
    sums: Sequence[int]


def share_bounds(sizes: Sizes, *, count: int, shares_prefix: bool) -> list[int]:
    """Cut completions, in their order, into one share for each process, so that the dearest is as cheap as it can be.

    A group that is cut costs its prompt in both shares; the order is kept so that this happens `count - 1` times at most.

    Args:
        sizes: Of the R completions of a step.
        count: Number of processes.
        shares_prefix: Whether a prompt is fed once for its completions.

    Returns:
        Where each share begins, and R at the end.
    """
    costs = _costs(sizes, shares_prefix=shares_prefix)
    starts = [0]
    if costs.sums and count > 1:
        # No cut does with less; and none needs more, since a part that is full leaves out one completion, and may feed one prompt again.
        most = max(costs.alone)
        least = max(most, -(-costs.sums[-1] // count))
        limits = range(least, least + 2 * most)
        starts = _starts(
            costs, least + bisect_left(limits, True, key=lambda limit: len(_starts(costs, limit)) <= count)
        )
    # What comes before the first that costs anything is the first process's.
    bounds = [0, *(costs.places[start] for start in starts[1:])]
    return bounds + [len(sizes.active)] * (count + 1 - len(bounds))


def _costs(sizes: Sizes, *, shares_prefix: bool) -> _Costs:
    alone = sizes.prompts + sizes.completions - 1
    places = (sizes.active & (alone > 0)).nonzero().flatten()
    group = sizes.begins.cumsum(0)[places]
    fed = torch.zeros(len(places), dtype=torch.bool)
    if shares_prefix:
        fed[1:] = group[1:] == group[:-1]
    added = alone[places] - torch.where(fed, sizes.prompts[places], 0)
    return _Costs(places=places.tolist(), alone=alone[places].tolist(), sums=added.cumsum(0).tolist())


def _starts(costs: _Costs, limit: int) -> list[int]:
    """Begin a new part wherever the cost would pass the limit; a completion that is dearer by itself gets a part of its own.

    From one start to the next is one search among the sums, so that cutting takes as long as there are parts, not completions.
    """
    starts, start = [], 0
    while start < len(costs.sums):
        starts.append(start)
        room = max(limit - costs.alone[start], 0)
        start = bisect_right(costs.sums, costs.sums[start] + room, lo=start)
    return starts
