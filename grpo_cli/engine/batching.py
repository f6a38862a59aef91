"""Groups become micro-batches under a token budget. The split changes speed and memory, never the gradient."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from grpo_cli.types import MicroBatch, PolicyLogps, Segment, StepTotals, TokenBatch, TrainingGroup

ATTENTION_SLOTS_PER_TOKEN = 6
"""Key and value slots that take as much memory as all activations of one token; measured on a Llama."""


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
    device: torch.device,
) -> list[MicroBatch]:
    """Split the groups of an optimizer step into micro-batches.

    Completions keep their order, so that statistics can be put back; one that is longer than the budget gets a micro-batch of
    its own.

    Args:
        groups: The step's groups.
        logps: Old and reference log-probabilities of each group.
        micro_batch_tokens: Most tokens in one forward, padding included.
        shares_prefix: Whether a prompt is fed once for its completions of a micro-batch, without padding.
        device: Where the tensors go.
    """
    rows = [
        _Row(group=number, index=index, prompt=len(group.prompt_ids), completion=len(ids) - 1)
        for number, group in enumerate(groups)
        for index, ids in enumerate(group.completion_ids)
    ]
    size = _packed_size if shares_prefix else _padded_size
    return [_micro_batch(part, groups, logps, device) for part in _split(rows, micro_batch_tokens, size)]


def _split(rows: Sequence[_Row], budget: int, size: Callable[[Sequence[_Row]], int]) -> list[list[_Row]]:
    """Cut the row sequence wherever its size would pass the budget."""
    parts: list[list[_Row]] = []
    for row in rows:
        if parts and size([*parts[-1], row]) <= budget:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


def _padded_size(rows: Sequence[_Row]) -> int:
    """Tokens of rows that are all as long as the longest."""
    return len(rows) * max(row.prompt + row.completion for row in rows)


def _packed_size(rows: Sequence[_Row]) -> int:
    """Tokens of one row with every prompt once, and what its attention keeps besides, in tokens.

    The keys and values of the prompt are copied to each of its completions, which are filled up to the longest.
    """
    tokens = sum({row.group: row.prompt for row in rows}.values()) + sum(row.completion for row in rows)
    by_group: dict[int, list[_Row]] = {}
    for row in rows:
        by_group.setdefault(row.group, []).append(row)
    slots = sum(
        len(members) * (members[0].prompt + max(row.completion for row in members)) for members in by_group.values()
    )
    return tokens + slots // ATTENTION_SLOTS_PER_TOKEN


def _micro_batch(
    rows: Sequence[_Row], groups: Sequence[TrainingGroup], logps: Sequence[PolicyLogps], device: torch.device
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
    return MicroBatch(segments=_segments(rows, groups), tokens=tokens)


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
        Segment(prompt_ids=groups[number].prompt_ids, completion_ids=tuple(completions))
        for number, completions in members
    )


def without_idle(
    group: TrainingGroup, logps: PolicyLogps, *, zero_advantages_count: bool
) -> tuple[TrainingGroup, PolicyLogps]:
    """Leave out the completions of a group that cannot add to the gradient.

    Those are the ones that are masked from the loss and, unless `zero_advantages_count`, those whose advantage is exactly 0:
    every policy term has it as a factor.
    """
    kept = [
        index
        for index, advantage in enumerate(group.advantages.tolist())
        if group.in_loss[index] and (zero_advantages_count or advantage != 0)
    ]
    if len(kept) == len(group.completion_ids):
        return group, logps
    smaller = replace(
        group,
        completion_ids=tuple(group.completion_ids[index] for index in kept),
        behaviour_logps=tuple(group.behaviour_logps[index] for index in kept),
        advantages=group.advantages[kept],
        in_loss=(True,) * len(kept),
    )
    return smaller, PolicyLogps(
        old=None if logps.old is None else tuple(logps.old[index] for index in kept),
        reference=None if logps.reference is None else tuple(logps.reference[index] for index in kept),
    )


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
        local_sequences=sequences,
        entropy_tokens=tokens,
    )
