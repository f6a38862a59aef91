"""How segments are laid out for one forward: padded rows, or one packed row in which a prompt is fed once for all its completions.

Letters: N rows, T tokens of a row, C completion tokens, P prompt tokens.
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
        start: Where the prompt begins in the row.
        length: P.
        places: int64 [G, W], where the tokens of each completion stand in the row; filled up with the completion's first place.
        present: bool [G, W], False where it is filled up.
    """

    start: int
    length: int
    places: Tensor
    present: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What goes into the model, and where its output is needed. A completion's last token predicts nothing and is not fed.

    Attributes:
        ids: int64 [N, T].
        positions: int64 [N, T], position of each token in its own sequence.
        attention_mask: int64 [N, T]; 0: padding.
        row, column: int64 [C], the place whose hidden state predicts each completion token.
        targets: int64 [C], the completion tokens.
        target_positions: int64 [C], their index within their completion.
        prefixes: How a packed row is to be attended; empty for padded rows.
    """

    ids: Tensor
    positions: Tensor
    attention_mask: Tensor
    row: Tensor
    column: Tensor
    targets: Tensor
    target_positions: Tensor
    prefixes: tuple[SharedPrefix, ...] = ()

    def to(self, device: torch.device) -> "Layout":
        """Move everything to a device."""
        names = ("ids", "positions", "attention_mask", "row", "column", "targets", "target_positions")
        moved = {name: getattr(self, name).to(device) for name in names}
        prefixes = tuple(
            replace(prefix, places=prefix.places.to(device), present=prefix.present.to(device))
            for prefix in self.prefixes
        )
        return replace(self, prefixes=prefixes, **moved)


def padded_rows(segments: tuple[Segment, ...]) -> Layout:
    """One row per completion: its prompt, itself, and padding on the right."""
    pairs = list(_pairs(segments))
    width = max(len(prompt) + len(completion) - 1 for prompt, completion in pairs)
    ids = torch.zeros(len(pairs), width, dtype=torch.long)
    attention_mask = torch.zeros_like(ids)
    row, column = [], []
    for index, (prompt, completion) in enumerate(pairs):
        length = len(prompt) + len(completion) - 1
        ids[index, :length] = torch.tensor((prompt + completion)[:-1])
        attention_mask[index, :length] = 1
        row.append(torch.full((len(completion),), index))
        column.append(torch.arange(len(prompt) - 1, length))
    return Layout(
        ids=ids,
        positions=torch.arange(width).expand_as(ids),
        attention_mask=attention_mask,
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
    ids: list[int] = []
    positions: list[int] = []
    column: list[Tensor] = []
    prefixes = []
    for segment in segments:
        start, length = len(ids), len(segment.prompt_ids)
        ids += segment.prompt_ids
        positions += range(length)
        spans = []
        for completion in segment.completion_ids:
            fed = len(completion) - 1
            spans.append(torch.arange(len(ids), len(ids) + fed))
            column += [torch.tensor([start + length - 1]), spans[-1]]
            ids += completion[:-1]
            positions += range(length, length + fed)
        prefixes.append(_shared_prefix(start, length, spans))
    columns = torch.cat(column)
    return Layout(
        ids=torch.tensor([ids]),
        positions=torch.tensor([positions]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        row=torch.zeros_like(columns),
        column=columns,
        targets=_targets(segments),
        target_positions=_target_positions(segments),
        prefixes=tuple(prefixes),
    )


def _shared_prefix(start: int, length: int, spans: list[Tensor]) -> SharedPrefix:
    """Describe the attention of a prompt and its completions; those that feed no token need none."""
    spans = [span for span in spans if len(span)]
    if not spans:
        nowhere = torch.empty(0, 0, dtype=torch.long)
        return SharedPrefix(start=start, length=length, places=nowhere, present=nowhere.bool())
    width = max(len(span) for span in spans)
    places = torch.stack([torch.cat([span, span[:1].expand(width - len(span))]) for span in spans])
    present = torch.stack([torch.arange(width) < len(span) for span in spans])
    return SharedPrefix(start=start, length=length, places=places, present=present)


def _pairs(segments: tuple[Segment, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for segment in segments:
        for completion in segment.completion_ids:
            yield segment.prompt_ids, completion


def _targets(segments: tuple[Segment, ...]) -> Tensor:
    return torch.tensor([token for _, completion in _pairs(segments) for token in completion])


def _target_positions(segments: tuple[Segment, ...]) -> Tensor:
    return torch.cat([torch.arange(len(completion)) for _, completion in _pairs(segments)])
