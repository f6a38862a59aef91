"""Who computes what: the completions of an optimizer step, spread over the processes by the tokens they cost."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

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
        owned: Indices of the completions of each group that are this process's.
        computed: Those of them that go through the model.
    """

    groups: Sequence[TrainingGroup]
    owned: Sequence[Sequence[int]]
    computed: Sequence[Sequence[int]]

    def owned_groups(self) -> list[TrainingGroup]:
        """Give the groups with only the completions that are this process's."""
        return [only(group, indices) for group, indices in zip(self.groups, self.owned, strict=True)]

    def computed_groups(self) -> list[TrainingGroup]:
        """Give the groups with only the completions that this process computes."""
        return [only(group, indices) for group, indices in zip(self.groups, self.computed, strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """A completion on its way to a process.

    Attributes:
        group, index: Which one.
        prompt, completion: Tokens that it costs: those of its prompt, and its own. Both are 0 if it is left out of the forward.
    """

    group: int
    index: int
    prompt: int
    completion: int


def shares(
    groups: Sequence[TrainingGroup], active: Sequence[Sequence[int]], *, count: int, shares_prefix: bool
) -> list[Share]:
    """Cut the step's completions, in their order, into one share for each process, so that the dearest is as cheap as it can be.

    A group that is cut costs its prompt in both shares; the order is kept so that this happens `count - 1` times at most.

    Args:
        groups: The step's groups.
        active: Indices of the completions of each group that go through the model. The others cost nothing.
        count: Number of processes.
        shares_prefix: Whether a prompt is fed once for its completions.

    Returns:
        One per process.
    """
    rows = [
        _Row(
            group=number,
            index=index,
            prompt=len(group.prompt_ids) if index in computed else 0,
            completion=len(ids) - 1 if index in computed else 0,
        )
        for number, (group, computed) in enumerate(zip(groups, map(set, active), strict=True))
        for index, ids in enumerate(group.completion_ids)
    ]
    highest = sum(row.prompt + row.completion for row in rows)
    limit = (
        highest
        if count == 1
        else bisect_left(
            range(highest), True, key=lambda most: len(_cut(rows, most, shares_prefix=shares_prefix)) <= count
        )
    )
    parts = _cut(rows, limit, shares_prefix=shares_prefix)
    parts += [[] for _ in range(count - len(parts))]
    return [_share(part, groups, active) for part in parts]


def _share(part: Sequence[_Row], groups: Sequence[TrainingGroup], active: Sequence[Sequence[int]]) -> Share:
    owned: list[list[int]] = [[] for _ in groups]
    computed: list[list[int]] = [[] for _ in groups]
    for row in part:
        owned[row.group].append(row.index)
        if row.index in active[row.group]:
            computed[row.group].append(row.index)
    return Share(groups=groups, owned=owned, computed=computed)


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


def _cut(rows: Sequence[_Row], limit: int, *, shares_prefix: bool) -> list[list[_Row]]:
    """Begin a new part wherever the cost would pass the limit; a completion that is dearer by itself gets a part of its own."""
    parts: list[list[_Row]] = [[]]
    load, fed = 0, -1
    for row in rows:
        cost = row.completion + (0 if shares_prefix and row.group == fed else row.prompt)
        if load and cost and load + cost > limit:
            parts.append([])
            load, cost = 0, row.completion + row.prompt
        load += cost
        if cost:
            fed = row.group
        parts[-1].append(row)
    return parts
