"""Groups become micro-batches under a token budget. The split changes speed and memory, never the gradient."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from grpo_cli.types import MicroBatch, PolicyLogps, Segment, StepTotals, TokenBatch, TrainingGroup

LEAST_SHARE_OF_A_PART = 4
"""A part of a group gets at least this fraction (one over it) of the budget, however much of that its prompt takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """One completion on its way into a micro-batch.

    Attributes:
        group, index: Which one.
        prompt, completion: Tokens fed of each; a completion's last one is not.
    """

    group: int
    index: int
    prompt: int
    completion: int


def micro_batches(
    groups: Sequence[TrainingGroup],
    logps: Sequence[PolicyLogps],
    *,
    micro_batch_tokens: int,
    shares_prefix: bool,
    splits_prompts: bool = True,
    device: torch.device,
) -> list[MicroBatch]:
    """Split the groups of an optimizer step into micro-batches.

    Completions keep their order, so that statistics can be put back. With a shared prefix whole groups go together; one that is
    larger than the budget is cut into parts. A completion that is longer than the budget gets a micro-batch of its own.

    Args:
        groups: The step's groups.
        logps: Old and reference log-probabilities of each group.
        micro_batch_tokens: Most tokens in one forward, padding included.
        shares_prefix: Whether a prompt is fed once for its completions of a micro-batch, without padding.
        splits_prompts: Whether it can be fed once for several micro-batches, too.
        device: Where the tensors go.
    """
    rows = _rows(groups)
    if not shares_prefix:
        return [_micro_batch(part, groups, logps, device) for part in _split(rows, micro_batch_tokens, _padded_size)]
    batches = []
    for parts in _packed_parts(rows, micro_batch_tokens, splits_prompts=splits_prompts):
        last = len(parts) - 1
        batches += [
            _micro_batch(part, groups, logps, device, goes_on=splits_prompts and number < last)
            for number, part in enumerate(parts)
        ]
    return batches


def micro_batch_size(batch: MicroBatch, *, shares_prefix: bool) -> int:
    """Measure a micro-batch in the tokens of the budget."""
    return (_packed_size if shares_prefix else _padded_size)(_rows(batch.segments))


def _rows(segments: Sequence[TrainingGroup | Segment]) -> list[_Row]:
    """List the completions."""
    return [
        _Row(group=number, index=index, prompt=len(segment.prompt_ids), completion=len(ids) - 1)
        for number, segment in enumerate(segments)
        for index, ids in enumerate(segment.completion_ids)
    ]


def _split(rows: Sequence[_Row], budget: int, size: Callable[[Sequence[_Row]], int]) -> list[list[_Row]]:
    """Cut the row sequence wherever its size would pass the budget."""
    parts: list[list[_Row]] = []
    for row in rows:
        if parts and size([*parts[-1], row]) <= budget:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


def _packed_parts(rows: Sequence[_Row], budget: int, *, splits_prompts: bool) -> list[list[list[_Row]]]:
    """Pack whole groups, and cut those that do not fit: lists of parts, most of them with one part."""
    packings: list[list[list[_Row]]] = []
    for group in (list(members) for _, members in groupby(rows, key=lambda row: row.group)):
        if _packed_size(group) > budget:
            packings.append(_cut(group, budget, splits_prompts=splits_prompts))
        elif packings and len(packings[-1]) == 1 and _packed_size([*packings[-1][0], *group]) <= budget:
            packings[-1][0].extend(group)
        else:
            packings.append([group])
    return packings


def _cut(group: Sequence[_Row], budget: int, *, splits_prompts: bool) -> list[list[_Row]]:
    """Cut a group into parts, for each of which its prompt takes up memory, too."""
    room = budget - group[0].prompt
    if splits_prompts:
        room = max(room, budget // LEAST_SHARE_OF_A_PART)
    return _split(group, room, lambda rows: sum(row.completion for row in rows))


def _padded_size(rows: Sequence[_Row]) -> int:
    """Tokens of rows that are all as long as the longest."""
    return len(rows) * max(row.prompt + row.completion for row in rows)


def _packed_size(rows: Sequence[_Row]) -> int:
    """Tokens of one row with every prompt once."""
    return sum({row.group: row.prompt for row in rows}.values()) + sum(row.completion for row in rows)


def _micro_batch(
    rows: Sequence[_Row],
    groups: Sequence[TrainingGroup],
    logps: Sequence[PolicyLogps],
    device: torch.device,
    *,
    goes_on: bool = False,
) -> MicroBatch:
    """Build the micro-batch of some rows."""
    lengths = [len(groups[row.group].completion_ids[row.index]) for row in rows]
    counts = torch.tensor(lengths)
    in_loss = torch.tensor([groups[row.group].in_loss[row.index] for row in rows])
    old = [logps[row.group].old for row in rows]
    reference = [logps[row.group].reference for row in rows]
    tokens = TokenBatch(
        sequence=torch.arange(len(rows)).repeat_interleave(counts).to(device),
        loss_mask=in_loss.repeat_interleave(counts).to(device),
        advantages=torch.stack([groups[row.group].advantages[row.index] for row in rows]).to(device),
        behaviour_logps=torch.cat([groups[row.group].behaviour_logps[row.index] for row in rows]).to(device),
        old_logps=_joined(old, rows, device),
        ref_logps=_joined(reference, rows, device),
    )
    return MicroBatch(segments=_segments(rows, groups), tokens=tokens, goes_on=goes_on)


def _joined(
    per_row: Sequence[tuple[torch.Tensor, ...] | None], rows: Sequence[_Row], device: torch.device
) -> torch.Tensor | None:
    """Concatenate the log-probabilities of the rows; None if the groups have none."""
    present = [values[row.index] for values, row in zip(per_row, rows, strict=True) if values is not None]
    if not present:
        return None
    assert len(present) == len(rows), "the groups of one step either all have these log-probabilities or none has"
    return torch.cat(present).to(device)


def _segments(rows: Sequence[_Row], groups: Sequence[TrainingGroup]) -> tuple[Segment, ...]:
    """Join neighbouring rows of one group."""
    members: list[tuple[int, list[tuple[int, ...]]]] = []
    for row in rows:
        ids = groups[row.group].completion_ids[row.index]
        if members and members[-1][0] == row.group:
            members[-1][1].append(ids)
        else:
            members.append((row.group, [ids]))
    return tuple(
        Segment(prompt_ids=groups[number].prompt_ids, completion_ids=tuple(completions), images=groups[number].images)
        for number, completions in members
    )


def active_completions(group: TrainingGroup, *, zero_advantages_count: bool) -> list[int]:
    """Give the indices of the completions of a group that can add to the gradient.

    The others are those that are masked from the loss and, unless `zero_advantages_count`, those whose advantage is exactly 0:
    every policy term has it as a factor.
    """
    return [
        index
        for index, advantage in enumerate(group.advantages.tolist())
        if group.in_loss[index] and (zero_advantages_count or advantage != 0)
    ]


def only(group: TrainingGroup, indices: Sequence[int]) -> TrainingGroup:
    """Keep some completions of a group."""
    return replace(
        group,
        completion_ids=tuple(group.completion_ids[index] for index in indices),
        behaviour_logps=tuple(group.behaviour_logps[index] for index in indices),
        advantages=group.advantages[list(indices)],
        in_loss=tuple(group.in_loss[index] for index in indices),
    )


def only_logps(logps: PolicyLogps, indices: Sequence[int]) -> PolicyLogps:
    """Keep the log-probabilities of some completions of a group."""
    return PolicyLogps(
        old=None if logps.old is None else tuple(logps.old[index] for index in indices),
        reference=None if logps.reference is None else tuple(logps.reference[index] for index in indices),
    )


def by_completion(
    flat: torch.Tensor, groups: Sequence[TrainingGroup], indices: Mapping[int, Sequence[int]]
) -> list[tuple[torch.Tensor, ...]]:
    """Cut the log-probabilities of some completions of each group apart, with zeros in the places of the others.

    Args:
        flat: float [C], the tokens of those completions, one after another.
        groups: All completions.
        indices: By the number of a group, which of it were computed.

    Returns:
        Per group G tensors [L].
    """
    lengths = [len(groups[number].completion_ids[index]) for number, computed in indices.items() for index in computed]
    parts = iter(torch.split(flat, lengths))
    return [
        tuple(
            next(parts) if index in indices.get(number, ()) else torch.zeros(len(ids))
            for index, ids in enumerate(group.completion_ids)
        )
        for number, group in enumerate(groups)
    ]


def sequence_tokens(groups: Sequence[TrainingGroup]) -> int:
    """Count the tokens of completions that go through the model, prompts once for each completion."""
    return sum(len(group.prompt_ids) + len(ids) - 1 for group in groups for ids in group.completion_ids)


def step_totals(groups: Sequence[TrainingGroup]) -> StepTotals:
    """Count the denominators of a step on one process, without an entropy threshold."""
    tokens = sum(
        len(ids)
        for group in groups
        for ids, in_loss in zip(group.completion_ids, group.in_loss, strict=True)
        if in_loss
    )
    sequences = sum(len(group.completion_ids) for group in groups)
    return StepTotals(
        completion_tokens=tokens,
        sequences=sequences,
        local_tokens=tokens,
        entropy_tokens=tokens,
    )
