"""Groups that go from one process to another: what was found of them, to where their prompts are known."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from grpo_cli.engine.distributed import Processes
from grpo_cli.engine.messages import packed, unpacked
from grpo_cli.errors import TrainingError
from grpo_cli.types import Completion, FinishReason, Group, LoggedColumn, PolicyVersion, Prompt, ScoredGroup

_REASONS = {reason.value: reason for reason in FinishReason}
"""A look-up: calling the enumeration takes several times as long, and there is a call for every completion."""


def collected(groups: Sequence[Group], prompts: Sequence[Prompt], processes: Processes) -> list[Group]:
    """Bring the groups of all processes to the main one.

    Args:
        groups: Of this process.
        prompts: In the main process, of all groups, by rank.
        processes: The processes of this run.

    Returns:
        All groups, in the main process; none elsewhere.

    Raises:
        TrainingError: If another process has completed other prompts.
    """
    if processes.count == 1:
        return list(groups)
    if not processes.is_main:
        processes.to_main(groups_message(groups))
        return []
    remaining = iter(prompts[len(groups) :])
    return [*groups, *(one for told in processes.to_main(b"")[1:] for one in groups_of(told, remaining))]


def collected_scores(
    scored: Sequence[ScoredGroup], prompts: Sequence[Prompt], holders: range, processes: Processes
) -> list[ScoredGroup]:
    """Bring scored groups of some processes to the main one; see `collected`.

    Args:
        scored: What this process has of them.
        prompts: In the main process, of all of them, by rank.
        holders: Ranks of those processes.
        processes: The processes of this run.
    """
    if not processes.is_main:
        brought(scores_message(scored) if processes.rank in holders else b"", holders, processes)
        return []
    remaining = iter(prompts[len(scored) :])
    return [*scored, *(one for told in brought(b"", holders, processes)[1:] for one in _scores_of(told, remaining))]


def brought(message: bytes, holders: range, processes: Processes) -> list[bytes]:
    """Give the main process the messages of some, by rank; the others get nothing.

    Args:
        message: Of this process; it does not travel if this is none of them.
        holders: Their ranks: the first ones, or none.
        processes: The processes of this run.
    """
    told = {0: message} if processes.rank in holders else {}
    return list(processes.send(told, sources=holders if processes.is_main else ()).values())


def groups_message(groups: Sequence[Group]) -> bytes:
    """Write all of groups but their prompts."""
    return packed(*_completions(groups))


def scores_message(scored: Sequence[ScoredGroup]) -> bytes:
    """Write all of scored groups but their prompts."""
    tensors, told = _completions([one.group for one in scored])
    rewards = torch.cat([one.rewards for one in scored]) if scored else torch.empty(0)
    more = {
        "dropped": [one.dropped for one in scored],
        "failed": [list(one.failed) for one in scored],
        "extras": [[[*column, *map(_sendable, values)] for column, values in one.extras.items()] for one in scored],
    }
    return packed({**tensors, "rewards": rewards}, {**told, **more})


def groups_of(message: bytes, prompts: Iterator[Prompt]) -> list[Group]:
    """Undo `groups_message`.

    Args:
        message: From there.
        prompts: The next of them are those that were completed.

    Raises:
        TrainingError: If they are not.
    """
    return _groups(*unpacked(message), prompts)


def _completions(groups: Sequence[Group]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    flat = [completion for group in groups for completion in group.completions]
    told = {
        "prompts": [prompt_checksum(group.prompt) for group in groups],
        "sizes": [len(group.completions) for group in groups],
        "lengths": [len(one.ids) for one in flat],
        "texts": [one.text for one in flat],
        "finish_reasons": [one.finish_reason.value for one in flat],
        "policy_versions": [one.policy_version for one in flat],
    }
    tensors = {
        "ids": torch.tensor([token for one in flat for token in one.ids], dtype=torch.int64),
        "logps": torch.cat([torch.empty(0), *(one.logps for one in flat)]),
    }
    return tensors, told


def _groups(tensors: dict[str, Tensor], told: dict[str, Any], prompts: Iterator[Prompt]) -> list[Group]:
    ids = iter(tensors["ids"].tolist())
    logps = torch.split(tensors["logps"], told["lengths"])
    rest = zip(told["lengths"], logps, told["texts"], told["finish_reasons"], told["policy_versions"], strict=True)
    groups = []
    for prompt, checksum, size in zip(islice(prompts, len(told["sizes"])), told["prompts"], told["sizes"], strict=True):
        if checksum != prompt_checksum(prompt):
            raise TrainingError(
                f"another process has completed another prompt {prompt.uid} than the first one knows",
                hint="a dataset's function must give all processes the same rows",
            )
        completions = tuple(
            Completion(
                index=index,
                ids=tuple(islice(ids, length)),
                logps=values,
                text=text,
                finish_reason=_REASONS[reason],
                policy_version=PolicyVersion(version),
            )
            for index, (length, values, text, reason, version) in enumerate(islice(rest, size))
        )
        groups.append(Group(prompt=prompt, completions=completions))
    return groups


def prompt_checksum(prompt: Prompt) -> int:
    """Tell prompts apart, by what is sampled from."""
    return crc32(repr((prompt.uid, prompt.ids, *map(crc32, prompt.images))).encode())


def _scores_of(message: bytes, prompts: Iterator[Prompt]) -> Iterable[ScoredGroup]:
    tensors, told = unpacked(message)
    rewards = torch.split(tensors.pop("rewards"), told["sizes"])
    groups = _groups(tensors, told, prompts)
    for group, values, dropped, failed, extras in zip(
        groups, rewards, told["dropped"], told["failed"], told["extras"], strict=True
    ):
        logged = {LoggedColumn(function, name): tuple(column) for function, name, *column in extras}
        yield ScoredGroup(group=group, rewards=values, extras=logged, dropped=dropped, failed=tuple(failed))


def _sendable(value: Any) -> Any:
    """Give what a completion file makes of a logged value that is no number: its text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    item = getattr(value, "item", None)
    try:
        return _sendable(item()) if callable(item) else str(value)
    except (TypeError, ValueError, RuntimeError):  # it is an array, or has another method of that name
        return str(value)
