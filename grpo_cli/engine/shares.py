"""Who computes what: the completions of an optimizer step, spread over the processes by the tokens they cost."""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from grpo_cli.engine.batching import by_completion, only
from grpo_cli.engine.distributed import Processes
from grpo_cli.types import TrainingGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one process computes of a step.

    Attributes:
        groups: All completions of the step.
        owned: By the number of a group, the indices of its completions that are this process's. Other groups are left out: a process
            has a part in few of them, however many there are.
        computed: Those of them that go through the model, in the same way.
    """

    groups: Sequence[TrainingGroup]
    owned: Mapping[int, Sequence[int]]
    computed: Mapping[int, Sequence[int]]

    def owned_groups(self) -> list[TrainingGroup]:
        """Give the groups in `owned` with only the completions that are this process's."""
        return [only(self.groups[number], indices) for number, indices in self.owned.items()]

    def computed_groups(self) -> list[TrainingGroup]:
        """Give the groups in `computed` with only the completions that this process computes."""
        return [only(self.groups[number], indices) for number, indices in self.computed.items()]


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


def share_of(
    rank: int, groups: Sequence[TrainingGroup], active: Sequence[Sequence[int]], *, count: int, shares_prefix: bool
) -> Share:
    """Cut the step's completions, in their order, into one share for each process, so that the dearest is as cheap as it can be.

    A group that is cut costs its prompt in both shares; the order is kept so that this happens `count - 1` times at most.

    Args:
        rank: Whose share to give.
        groups: The step's groups.
        active: Indices of the completions of each group that go through the model. The others cost nothing.
        count: Number of processes.
        shares_prefix: Whether a prompt is fed once for its completions.
    """
    costs = _costs(groups, active, shares_prefix=shares_prefix)
    highest = sum(costs.alone)
    limit = (
        highest
        if count == 1
        else bisect_left(range(highest), True, key=lambda most: len(_starts(costs, most)) <= count)
    )
    rows = [(number, index) for number, group in enumerate(groups) for index in range(len(group.completion_ids))]
    # What comes before the first that costs anything is the first process's.
    bounds = [0, *(costs.places[start] for start in _starts(costs, limit)[1:])]
    bounds += [len(rows)] * (count + 1 - len(bounds))
    owned: dict[int, list[int]] = defaultdict(list)
    for number, index in rows[bounds[rank] : bounds[rank + 1]]:
        owned[number].append(index)
    computed = {number: [index for index in indices if index in active[number]] for number, indices in owned.items()}
    some_computed = {number: indices for number, indices in computed.items() if indices}
    return Share(groups=groups, owned=dict(owned), computed=some_computed)


def _costs(groups: Sequence[TrainingGroup], active: Sequence[Sequence[int]], *, shares_prefix: bool) -> _Costs:
    places, alone, added = [], [], []
    before = 0
    for group, indices in zip(groups, active, strict=True):
        prompt, fed = len(group.prompt_ids), False
        for index in sorted(indices):
            completion = len(group.completion_ids[index]) - 1
            if prompt + completion:
                places.append(before + index)
                alone.append(prompt + completion)
                added.append(completion if fed and shares_prefix else prompt + completion)
                fed = True
        before += len(group.completion_ids)
    return _Costs(places=places, alone=alone, sums=list(accumulate(added)))


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


def everyones(share: Share, found: Sequence[Tensor], processes: Processes) -> list[tuple[Tensor, ...]]:
    """Put what was found of this process's completions together with what the others found of theirs.

    Args:
        share: What this process computed.
        found: Per micro-batch float [C].
        processes: The processes of this run.

    Returns:
        Per group G tensors, float32 [L], CPU; zeros for what nobody computed.
    """
    joined = torch.cat(list(found)).float().cpu() if found else torch.empty(0)  # in one transfer
    mine = by_completion(joined, share.groups, share.computed)
    if processes.count == 1:
        return mine
    values = [one for group in mine for one in group]
    flat = processes.sum(torch.cat(values) if values else torch.empty(0))
    parts = iter(torch.split(flat, [len(one) for one in values]))
    return [tuple(next(parts) for _ in group) for group in mine]
