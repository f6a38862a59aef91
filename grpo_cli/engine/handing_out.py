"""Completions that go from the processes that have them to those that train on them, and to the main one for a checkpoint."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import torch
from torch import Tensor, nn

from grpo_cli.engine.distributed import Processes
from grpo_cli.engine.messages import packed, unpacked
from grpo_cli.engine.shares import Sizes, share_bounds
from grpo_cli.engine.step import GradientPass
from grpo_cli.engine.window import RolloutWindow, joined, window_from_state, window_state

_NOBODY = -1
"""In place of the rank of who has a completion where there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outline:
    """Who has which completions of a window, of which all are numbered in their order, and who trains on which.

    Attributes:
        held: Where what each process has begins, and the end of the last one.
        steps: For each optimizer step of a pass, which completions are its own.
        shares: For each, where the share of each process begins, and the end of the last one.
    """

    held: Sequence[int]
    steps: Sequence[range]
    shares: Sequence[Sequence[int]]

    def share(self, rank: int) -> list[range]:
        """Give the completions that a process trains on, by optimizer step."""
        return [range(bounds[rank], bounds[rank + 1]) for bounds in self.shares]


def handed_out(held: RolloutWindow, gradients: GradientPass) -> RolloutWindow:
    """Let each process have the completions that it trains on.

    Args:
        held: Those that this process has; no other has them. Together they are in the order of ranks.
        gradients: Knows what a completion costs.
    """
    processes = gradients.processes
    if processes.count == 1:
        return held
    outline = agreed_outline(held, gradients)
    first, end = outline.held[processes.rank : processes.rank + 2]
    parts: dict[int, list[range]] = defaultdict(lambda: [range(0)] * len(outline.steps))
    for number, step in enumerate(outline.steps):
        own = range(max(first, step.start), min(end, step.stop))
        for rank, part in _owners(own, outline.shares[number]):
            parts[rank][number] = range(part.start - own.start, part.stop - own.start)
    own_part = parts.pop(processes.rank, [range(0)] * len(outline.steps))
    kept, *given = held.parts([own_part, *parts.values()])
    sources = sorted({rank for rows in outline.share(processes.rank) for rank, _ in _owners(rows, outline.held)})
    messages = {rank: _message(part) for rank, part in zip(parts, given, strict=True)}
    told = processes.send(messages, sources=[rank for rank in sources if rank != processes.rank])
    found = {rank: _window(message) for rank, message in told.items()}
    return joined([one for _, one in sorted({**found, processes.rank: kept}.items())])


def own_share(whole: RolloutWindow, gradients: GradientPass) -> RolloutWindow:
    """Give the completions that this process trains on, of all: the same that `handed_out` gives.

    They hold on to nothing of the others.
    """
    processes = gradients.processes
    if processes.count == 1:
        return whole
    outline = _outline(_rows(whole, gradients), len(whole.groups), gradients)
    rows = [
        range(own.start - step.start, own.stop - step.start)
        for own, step in zip(outline.share(processes.rank), outline.steps, strict=True)
    ]
    return _window(_message(whole.part(rows)))  # a copy: tensors of a window that was read are views of those of all


def brought_together(window: RolloutWindow, processes: Processes) -> RolloutWindow:
    """Bring the shares of all processes to the main one; the others keep theirs."""
    if processes.count == 1:
        return window
    told = processes.to_main(b"" if processes.is_main else _message(window))
    return joined([window, *map(_window, told[1:])])


def _rows(window: RolloutWindow, gradients: GradientPass) -> Tensor:
    """Give the numbers of a window's completions: int32 [R, 6], see `_outline`."""
    rows: list[tuple[int, ...]] = []
    for step, groups in enumerate(window.groups):
        for group in groups:
            active = set(gradients.active(group))
            rows += [
                (gradients.processes.rank, step, index == 0, len(group.prompt_ids), len(ids), index in active)
                for index, ids in enumerate(group.completion_ids)
            ]
    return torch.tensor(rows, dtype=torch.int32).view(-1, 6)


def agreed_outline(held: RolloutWindow, gradients: GradientPass) -> Outline:
    """Have the main process, which is told what each completion costs, cut them into shares; the others are told where."""
    processes, num_steps = gradients.processes, len(held.groups)
    own = _rows(held, gradients)
    told = _costs_of_all(own.flatten(), processes)
    if told is None:
        (bounds,) = unpacked(processes.from_main(None))[0].values()
        starts, ends, *shares = torch.split(
            bounds, [processes.count + 1, num_steps, *[processes.count + 1] * num_steps]
        )
        return Outline(held=starts.tolist(), steps=_ranges(ends.tolist()), shares=[one.tolist() for one in shares])
    rows = told.view(-1, own.shape[1])
    outline = _outline(rows[rows[:, 0] != _NOBODY], num_steps, gradients)
    numbers = [*outline.held, *(step.stop for step in outline.steps), *chain(*outline.shares)]
    processes.from_main(packed({"bounds": torch.tensor(numbers)}, None))
    return outline


def _costs_of_all(own: Tensor, processes: Processes) -> Tensor | None:
    """Bring the numbers of all processes to the main one, by rank; those of `_NOBODY` may be among them."""
    width, whole = processes.most(len(own)), int(processes.sum(torch.tensor([len(own)])))
    if width * processes.count <= 2 * whole:
        return processes.rows_to_main(nn.functional.pad(own, (0, width - len(own)), value=_NOBODY), width)
    # One of them has nearly everything, such as what servers have sampled: messages of one length would be as many times that.
    told = processes.to_main(own.numpy().tobytes())
    if not processes.is_main:
        return None
    return torch.frombuffer(bytearray(b"".join(told)), dtype=own.dtype) if any(told) else own


def _outline(rows: Tensor, num_steps: int, gradients: GradientPass) -> Outline:
    """Cut all completions into shares."""
    holders, step_of, begins, prompts, completions, active = rows.long().T.contiguous()
    count = gradients.processes.count
    steps = _ranges(torch.searchsorted(step_of, torch.arange(num_steps), right=True).tolist())
    shares = []
    for step in steps:
        part = slice(step.start, step.stop)
        sizes = Sizes(
            begins=begins[part], prompts=prompts[part], completions=completions[part], active=active[part].bool()
        )
        bounds = share_bounds(sizes, count=count, shares_prefix=gradients.shares_prefix)
        shares.append([step.start + bound for bound in bounds])
    return Outline(held=torch.searchsorted(holders, torch.arange(count + 1)).tolist(), steps=steps, shares=shares)


def _ranges(ends: Sequence[int]) -> list[range]:
    """Give what lies between ends, the first of which has all before it."""
    return [range(start, end) for start, end in pairwise([0, *ends])]


def _owners(rows: range, bounds: Sequence[int]) -> Iterator[tuple[int, range]]:
    """Cut rows apart by the process whose they are, of which each has what lies between two bounds."""
    start = rows.start
    while start < rows.stop:
        rank = bisect_right(bounds, start) - 1
        end = min(rows.stop, bounds[rank + 1])
        yield rank, range(start, end)
        start = end


def _message(window: RolloutWindow) -> bytes:
    description, tensors = window_state(window)
    return packed(tensors, description)


def _window(message: bytes) -> RolloutWindow:
    tensors, description = unpacked(message)
    return window_from_state(description, tensors)
