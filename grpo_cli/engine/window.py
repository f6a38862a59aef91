"""A rollout window: what one generation gives to the optimizer steps that share it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from grpo_cli.types import FinishReason, PolicyLogps, PolicyVersion, PromptId, ScoredGroup, TrainingGroup

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutWindow:
    """Training groups by optimizer step, walked through `iterations` times.

    Attributes:
        groups: One tuple of groups per optimizer step of a pass.
        logps: Old and reference log-probabilities, in the same shape. The first step has no old ones before it is done: no weight
            has moved by then, and its own forward gives those that later passes need.
        iterations: Passes (mu).
    """

    groups: tuple[tuple[TrainingGroup, ...], ...]
    logps: tuple[tuple[PolicyLogps, ...], ...]
    iterations: int

    @property
    def length(self) -> int:
        """Optimizer steps of this window."""
        return len(self.groups) * self.iterations

    def at(self, position: int) -> tuple[tuple[TrainingGroup, ...], tuple[PolicyLogps, ...]]:
        """Give what the optimizer step at a position trains on."""
        index = position % len(self.groups)
        return self.groups[index], self.logps[index]

    def with_old(self, index: int, old: Sequence[tuple[Tensor, ...]]) -> "RolloutWindow":
        """Set the old log-probabilities of one optimizer step of a pass: per group G tensors [L]."""
        step = tuple(replace(entry, old=values) for entry, values in zip(self.logps[index], old, strict=True))
        return replace(self, logps=(*self.logps[:index], step, *self.logps[index + 1 :]))


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
        policy_version=scored.group.completions[0].policy_version,
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
        "policy_versions": [group.policy_version for group in groups],
        "with_old": [entry.old is not None for entry in logps],
        "with_reference": logps[0].reference is not None,
        "prompt_lengths": [len(group.prompt_ids) for group in groups],
        "completion_lengths": [[len(ids) for ids in group.completion_ids] for group in groups],
        "in_loss": [list(group.in_loss) for group in groups],
    }
    images = dict.fromkeys(image for group in groups for image in group.images)
    places = {image: place for place, image in enumerate(images)}
    description["image_lengths"] = [len(image) for image in images]
    description["image_places"] = [[places[image] for image in group.images] for group in groups]
    tensors = {
        "prompt_ids": torch.tensor([token for group in groups for token in group.prompt_ids]),
        "completion_ids": torch.tensor([token for group in groups for ids in group.completion_ids for token in ids]),
        "behaviour_logps": _flat([group.behaviour_logps for group in groups]),
        "advantages": torch.cat([group.advantages for group in groups]),
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
            policy_version=PolicyVersion(description["policy_versions"][number]),
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


def _flat(groups: Sequence[Sequence[Tensor]]) -> Tensor:
    """Join the completions' tensors of all groups, of which there may be none."""
    return torch.cat([torch.empty(0), *(values for group in groups for values in group)])


def _regroup(flat: Tensor, lengths: list[int], sizes: list[int]) -> list[tuple[Tensor, ...]]:
    """Split a flat tensor into completions and those into groups."""
    parts = iter(torch.split(flat, lengths))
    return [tuple(next(parts) for _ in range(size)) for size in sizes]


def by_step(values: Sequence[T], prompts_per_step: int) -> tuple[tuple[T, ...], ...]:
    """Split the groups of a generation into optimizer steps; the last one may be smaller."""
    return tuple(tuple(values[start : start + prompts_per_step]) for start in range(0, len(values), prompts_per_step))


def _by_sizes(values: Sequence[T], sizes: Sequence[int]) -> tuple[tuple[T, ...], ...]:
    """Split a flat sequence into optimizer steps."""
    remaining = iter(values)
    return tuple(tuple(next(remaining) for _ in range(size)) for size in sizes)
