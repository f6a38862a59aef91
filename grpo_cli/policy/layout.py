"""How segments are laid out for one forward: padded rows, or one packed row in which a prompt is fed once for all its completions.

Letters: N rows, T tokens of a row, C completion tokens, P prompt tokens, A kinds of rotary positions.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo_cli.types import Segment


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedPrefix:
    """A prompt in a packed row, and the completions that attend to it and to themselves.

    Attributes:
        start: Where the prompt's keys begin.
        length: P.
        completions: First place and number of the fed tokens of each completion; those that feed none are left out.
        images: First token and number of those of each image in the prompt, if they see each other both ways.
    """

    start: int
    length: int
    completions: tuple[tuple[int, int], ...]
    images: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What goes into the model, and where its output is needed. A completion's last token predicts nothing and is not fed.

    Attributes:
        ids: int64 [N, T].
        positions: int64 [N, T], position of each token in its own sequence; [A, 1, T] for a row that was given those of images.
        multiplicity: int64 [N, T], how many sequences a token stands for; 0: padding.
        row, column: int64 [C], the place whose hidden state predicts each completion token.
        targets: int64 [C], the completion tokens.
        target_positions: int64 [C], their index within their completion.
        prefixes: How a packed row is to be attended; empty for padded rows.
    """

    ids: Tensor
    positions: Tensor
    multiplicity: Tensor
    row: Tensor
    column: Tensor
    targets: Tensor
    target_positions: Tensor
    prefixes: tuple[SharedPrefix, ...] = ()

    def to(self, device: torch.device) -> "Layout":
        """Move everything to a device."""
        names = ("ids", "positions", "multiplicity", "row", "column", "targets", "target_positions")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


def padded_rows(segments: tuple[Segment, ...]) -> Layout:
    """One row per completion: its prompt, itself, and padding on the right."""
    pairs = list(_pairs(segments))
    width = max(len(prompt) + len(completion) - 1 for prompt, completion in pairs)
    ids = torch.zeros(len(pairs), width, dtype=torch.long)
    multiplicity = torch.zeros_like(ids)
    row, column = [], []
    for index, (prompt, completion) in enumerate(pairs):
        length = len(prompt) + len(completion) - 1
        ids[index, :length] = torch.tensor((prompt + completion)[:-1])
        multiplicity[index, :length] = 1
        row.append(torch.full((len(completion),), index))
        column.append(torch.arange(len(prompt) - 1, length))
    return Layout(
        ids=ids,
        positions=torch.arange(width).expand_as(ids),
        multiplicity=multiplicity,
        row=torch.cat(row),
        column=torch.cat(column),
        targets=_targets(segments),
        target_positions=_target_positions(segments),
    )


def packed_row(segments: tuple[Segment, ...]) -> Layout:
    """One row for all: a prompt, its completions one after another, the next prompt, ...

    The positions of every completion continue those of its prompt. The prompt's last token predicts the first token of each
    of them, so nothing is fed twice.
    """
    row = _Row()
    for segment in segments:
        start = len(row.ids)
        row.feed(segment.prompt_ids, first_position=0, multiplicity=len(segment.completion_ids))
        row.complete(segment, prompt_start=start, prompt_end=start + len(segment.prompt_ids) - 1)
    return row.layout(segments)


def completions_row(segment: Segment) -> Layout:
    """The completions of a prompt without the prompt, whose keys and values were computed before (see `SplitPrompt`).

    The states that predict first tokens are the prompt's last: place -1 of the row stands for it in `column`. In the places of
    `prefixes` the prompt's P keys come first.
    """
    row = _Row()
    row.complete(segment, prompt_start=0, prompt_end=-1, keys_before=len(segment.prompt_ids))
    return row.layout((segment,))


class _Row:
    """A packed row while it grows."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.multiplicity: list[int] = []
        self.columns: list[Tensor] = []
        self.prefixes: list[SharedPrefix] = []

    def feed(self, ids: tuple[int, ...], *, first_position: int, multiplicity: int) -> None:
        """Append tokens."""
        self.ids += ids
        self.multiplicity += [multiplicity] * len(ids)
        self.positions += range(first_position, first_position + len(ids))

    def complete(self, segment: Segment, *, prompt_start: int, prompt_end: int, keys_before: int = 0) -> None:
        """Append the completions of a prompt.

        Args:
            segment: The prompt and its completions.
            prompt_start: Place of the prompt's first key.
            prompt_end: Place of the state that predicts first tokens.
            keys_before: Keys that are not in the row but stand before it.
        """
        length = len(segment.prompt_ids)
        spans = []
        for completion in segment.completion_ids:
            first, fed = len(self.ids), len(completion) - 1
            self.columns += [torch.tensor([prompt_end]), torch.arange(first, first + fed)]
            self.feed(completion[:-1], first_position=length, multiplicity=1)
            if fed:
                spans.append((first + keys_before, fed))
        self.prefixes.append(SharedPrefix(start=prompt_start, length=length, completions=tuple(spans)))

    def layout(self, segments: tuple[Segment, ...]) -> Layout:
        """Close the row."""
        column = torch.cat(self.columns)
        return Layout(
            ids=torch.tensor([self.ids], dtype=torch.long),
            positions=torch.tensor([self.positions], dtype=torch.long),
            multiplicity=torch.tensor([self.multiplicity], dtype=torch.long),
            row=torch.zeros_like(column),
            column=column,
            targets=_targets(segments),
            target_positions=_target_positions(segments),
            prefixes=tuple(self.prefixes),
        )


def _pairs(segments: tuple[Segment, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for segment in segments:
        for completion in segment.completion_ids:
            yield segment.prompt_ids, completion


def _targets(segments: tuple[Segment, ...]) -> Tensor:
    return torch.tensor([token for _, completion in _pairs(segments) for token in completion])


def _target_positions(segments: tuple[Segment, ...]) -> Tensor:
    return torch.cat([torch.arange(len(completion)) for _, completion in _pairs(segments)])
