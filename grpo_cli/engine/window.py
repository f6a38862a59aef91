"""A rollout window: what one generation gives to the optimizer steps that share it."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, groupby, pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from grpo_cli.engine.batching import only, only_logps
from grpo_cli.types import FinishReason, PolicyLogps, PolicyVersion, PromptId, ScoredGroup, TrainingGroup

T = TypeVar("T")

_Entry = tuple[TrainingGroup, PolicyLogps]


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutWindow:
    """Training groups by optimizer step, walked through `iterations` times.

    What trains holds a process's share of them: some groups, and parts of some.

    Attributes:
        groups: One tuple of groups per optimizer step of a pass.
        logps: Old and reference log-probabilities, in the same shape. The first step has no old ones before it is done: no weight
            has moved by then, and its own forward gives those that later passes need.
        iterations: Passes (mu).
        policy_version: Which weights sampled them.
    """

    groups: tuple[tuple[TrainingGroup, ...], ...]
    logps: tuple[tuple[PolicyLogps, ...], ...]
    iterations: int
    policy_version: PolicyVersion

    @property
    def length(self) -> int:
        """Optimizer steps of this window."""
        return len(self.groups) * self.iterations

    @property
    def has_reference(self) -> bool:
        """Whether its groups, if there are any, have log-probabilities under a reference."""
        return all(entry.reference is not None for step in self.logps for entry in step)

    def at(self, position: int) -> tuple[tuple[TrainingGroup, ...], tuple[PolicyLogps, ...]]:
        """Give what the optimizer step at a position trains on."""
        index = position % len(self.groups)
        return self.groups[index], self.logps[index]

    def with_old(self, index: int, old: Sequence[tuple[Tensor, ...]]) -> "RolloutWindow":
        """Set the old log-probabilities of one optimizer step of a pass: per group G tensors [L]."""
        step = tuple(replace(entry, old=values) for entry, values in zip(self.logps[index], old, strict=True))
        return replace(self, logps=(*self.logps[:index], step, *self.logps[index + 1 :]))

    def part(self, rows: Sequence[range]) -> "RolloutWindow":
        """Give some of the completions, and no group that has none.

        Args:
            rows: Which of those of each optimizer step of a pass, counted through its groups.
        """
        return self.parts([rows])[0]

    def parts(self, wanted: Iterable[Sequence[range]]) -> list["RolloutWindow"]:
        """Give several parts, see `part`. The groups are counted once for all of them: one process may cut a window into thousands."""
        steps = self.entries()
        starts = [list(accumulate((len(group.completion_ids) for group, _ in step), initial=0)) for step in steps]
        return [self.of_entries([_part(*one) for one in zip(steps, starts, rows, strict=True)]) for rows in wanted]

    def entries(self) -> list[list[_Entry]]:
        """Give each group with its log-probabilities, by optimizer step."""
        return [list(zip(groups, logps, strict=True)) for groups, logps in zip(self.groups, self.logps, strict=True)]

    def of_entries(self, steps: Sequence[Sequence[_Entry]]) -> "RolloutWindow":
        """Give the window with other groups."""
        return replace(
            self,
            groups=tuple(tuple(group for group, _ in step) for step in steps),
            logps=tuple(tuple(logps for _, logps in step) for step in steps),
        )


def new_window(
    groups: Sequence[Sequence[TrainingGroup]], *, iterations: int, policy_version: PolicyVersion
) -> RolloutWindow:
    """Make a window whose log-probabilities are not computed yet; see `RolloutWindow` for the arguments."""
    return RolloutWindow(
        groups=tuple(map(tuple, groups)),
        logps=tuple(tuple(PolicyLogps() for _ in step) for step in groups),
        iterations=iterations,
        policy_version=policy_version,
    )


def joined(windows: Sequence[RolloutWindow]) -> RolloutWindow:
    """Put parts of one window together, in their order."""
    steps = zip(*(window.entries() for window in windows), strict=True)
    return windows[0].of_entries([_joined(chain.from_iterable(parts)) for parts in steps])


def _part(entries: Sequence[_Entry], starts: Sequence[int], rows: range) -> list[_Entry]:
    """Give some completions of an optimizer step.

    Args:
        entries: Its groups.
        starts: How many completions stand before each, and how many there are.
        rows: Which.
    """
    kept = []
    for number in range(bisect_right(starts, rows.start) - 1, min(bisect_left(starts, rows.stop), len(entries))):
        start, end = starts[number], starts[number + 1]
        indices = range(max(rows.start, start) - start, min(rows.stop, end) - start)
        if indices:
            group, logps = entries[number]
            kept.append((only(group, indices), only_logps(logps, indices)))
    return kept


def _joined(entries: Iterable[_Entry]) -> list[_Entry]:
    """Put neighbours that are parts of one group together."""
    whole = []
    for _, members in groupby(entries, key=lambda entry: entry[0].uid):
        groups, logps = zip(*members, strict=True)
        whole.append((_joined_groups(groups), _joined_logps(logps)))
    return whole


def _joined_groups(parts: Sequence[TrainingGroup]) -> TrainingGroup:
    return replace(
        parts[0],
        completion_ids=tuple(chain.from_iterable(part.completion_ids for part in parts)),
        behaviour_logps=tuple(chain.from_iterable(part.behaviour_logps for part in parts)),
        advantages=torch.cat([part.advantages for part in parts]),
        in_loss=tuple(chain.from_iterable(part.in_loss for part in parts)),
    )


def _joined_logps(parts: Sequence[PolicyLogps]) -> PolicyLogps:
    old = [part.old for part in parts if part.old is not None]
    reference = [part.reference for part in parts if part.reference is not None]
    return PolicyLogps(
        old=tuple(chain.from_iterable(old)) if old else None,
        reference=tuple(chain.from_iterable(reference)) if reference else None,
    )


def training_groups(
    scored: Sequence[ScoredGroup], advantages: Sequence[Tensor], *, mask_truncated: bool
) -> list[TrainingGroup]:
    """Keep of each scored group what the optimizer needs.

    A dropped group keeps its place, so that prompts and steps stay aligned, but has no completions: it counts nowhere.
    """
    return [
        _training_group(one, values, mask_truncated=mask_truncated)
        for one, values in zip(scored, advantages, strict=True)
    ]


def _training_group(scored: ScoredGroup, advantages: Tensor, *, mask_truncated: bool) -> TrainingGroup:
    """Keep of one scored group what the optimizer needs."""
    completions = () if scored.dropped else scored.group.completions
    return TrainingGroup(
        uid=scored.group.prompt.uid,
        prompt_ids=scored.group.prompt.ids,
        completion_ids=tuple(completion.ids for completion in completions),
        behaviour_logps=tuple(completion.logps for completion in completions),
        advantages=advantages[: len(completions)],
        in_loss=tuple(
            not (mask_truncated and completion.finish_reason is FinishReason.LENGTH) for completion in completions
        ),
        images=scored.group.prompt.images,
    )


def window_state(window: RolloutWindow) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Write a window as JSON and tensors, for a checkpoint that holds no pickles."""
    groups = [group for step in window.groups for group in step]
    logps = [entry for step in window.logps for entry in step]
    description: dict[str, Any] = {
        "iterations": window.iterations,
        "groups_per_step": [len(step) for step in window.groups],
        "uids": [group.uid for group in groups],
        "policy_version": window.policy_version,
        "with_old": [entry.old is not None for entry in logps],
        "with_reference": any(entry.reference is not None for entry in logps),
        "prompt_lengths": [len(group.prompt_ids) for group in groups],
        "completion_lengths": [[len(ids) for ids in group.completion_ids] for group in groups],
        "in_loss": [list(group.in_loss) for group in groups],
    }
    images = dict.fromkeys(image for group in groups for image in group.images)
    places = {image: place for place, image in enumerate(images)}
    description["image_lengths"] = [len(image) for image in images]
    description["image_places"] = [[places[image] for image in group.images] for group in groups]
    tensors = {
        "prompt_ids": _ids(group.prompt_ids for group in groups),
        "completion_ids": _ids(ids for group in groups for ids in group.completion_ids),
        "behaviour_logps": _flat([group.behaviour_logps for group in groups]),
        "advantages": torch.cat([torch.empty(0), *(group.advantages for group in groups)]),
    }
    if images:
        tensors["images"] = torch.frombuffer(bytearray(b"".join(images)), dtype=torch.uint8)
    if any(description["with_old"]):
        tensors["old"] = _flat([entry.old or () for entry in logps])
    if description["with_reference"]:
        tensors["reference"] = _flat([entry.reference or () for entry in logps])
    return description, tensors


def window_from_state(description: dict[str, Any], tensors: dict[str, Tensor]) -> RolloutWindow:
    """Undo `window_state`."""
    lengths: list[list[int]] = description["completion_lengths"]
    flat_lengths = [length for group in lengths for length in group]
    sizes = [len(group) for group in lengths]
    prompts = torch.split(tensors["prompt_ids"], description["prompt_lengths"])
    completions = _regroup(tensors["completion_ids"], flat_lengths, sizes)
    behaviour = _regroup(tensors["behaviour_logps"], flat_lengths, sizes)
    advantages = torch.split(tensors["advantages"], sizes)
    with_old: list[bool] = description["with_old"]
    old = _regroup(
        tensors.get("old", torch.empty(0)),
        [length for group, present in zip(lengths, with_old, strict=True) if present for length in group],
        [size if present else 0 for size, present in zip(sizes, with_old, strict=True)],
    )
    reference = (
        _regroup(tensors["reference"], flat_lengths, sizes) if description["with_reference"] else [None] * len(sizes)
    )
    images = _images(description, tensors)
    groups = [
        TrainingGroup(
            uid=PromptId(description["uids"][number]),
            prompt_ids=tuple(prompts[number].tolist()),
            completion_ids=tuple(tuple(ids.tolist()) for ids in completions[number]),
            behaviour_logps=behaviour[number],
            advantages=advantages[number],
            in_loss=tuple(description["in_loss"][number]),
            images=images[number],
        )
        for number in range(len(sizes))
    ]
    logps = [
        PolicyLogps(old=old[number] if with_old[number] else None, reference=reference[number])
        for number in range(len(sizes))
    ]
    return RolloutWindow(
        groups=_by_sizes(groups, description["groups_per_step"]),
        logps=_by_sizes(logps, description["groups_per_step"]),
        iterations=description["iterations"],
        policy_version=PolicyVersion(description["policy_version"]),
    )


def _images(description: dict[str, Any], tensors: dict[str, Tensor]) -> list[tuple[bytes, ...]]:
    """Give each group's images; there are none in the checkpoints of versions that knew no images."""
    if "images" not in tensors:
        return [()] * len(description["uids"])
    content, start = tensors["images"].numpy().tobytes(), 0
    images = []
    for length in description["image_lengths"]:
        images.append(content[start : start + length])
        start += length
    return [tuple(images[place] for place in places) for places in description["image_places"]]


def _ids(sequences: Iterable[tuple[int, ...]]) -> Tensor:
    """Join token ids, of which there may be none."""
    return torch.tensor(list(chain.from_iterable(sequences)), dtype=torch.int64)


def _flat(groups: Sequence[Sequence[Tensor]]) -> Tensor:
    """Join the completions' tensors of all groups, of which there may be none."""
    return torch.cat([torch.empty(0), *(values for group in groups for values in group)])


def _regroup(flat: Tensor, lengths: list[int], sizes: list[int]) -> list[tuple[Tensor, ...]]:
    """Split a flat tensor into completions and those into groups."""
    parts = iter(torch.split(flat, lengths))
    return [tuple(next(parts) for _ in range(size)) for size in sizes]


def by_step(groups: Sequence[T], places: range, *, count: int, prompts_per_step: int) -> tuple[tuple[T, ...], ...]:
    """Split groups into optimizer steps; the last one may be smaller.

    Args:
        groups: Some of a generation.
        places: Which.
        count: How many groups the generation has.
        prompts_per_step: Groups of an optimizer step.
    """
    starts = range(0, count, prompts_per_step)
    cuts = [min(max(start - places.start, 0), len(places)) for start in (*starts, count)]
    return tuple(tuple(groups[start:end]) for start, end in pairwise(cuts))


def _by_sizes(values: Sequence[T], sizes: Sequence[int]) -> tuple[tuple[T, ...], ...]:
    """Split a flat sequence into optimizer steps."""
    remaining = iter(values)
    return tuple(tuple(next(remaining) for _ in range(size)) for size in sizes)
