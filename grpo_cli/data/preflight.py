"""A look at all rows before anything is trained: which give prompts, how long they are, and what was left out and why."""

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from datasets import Dataset, IterableDataset

from grpo_cli.data.columns import as_rows, check_columns, column_names
from grpo_cli.data.prompts import PromptBuilder, Rejected, prompt_id
from grpo_cli.errors import DataError
from grpo_cli.types import Prompt

STREAM_SAMPLE = 64
"""Rows of a stream that are looked at."""

_BATCH_ROWS = 512
_ROWS_SHOWN = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Tokens of the usable prompts, after the length policy.

    Attributes:
        minimum, maximum: The shortest and the longest.
        mean: The average.
        p95: The smallest length that at least 95 % of the prompts do not exceed.
    """

    minimum: int
    mean: float
    p95: int
    maximum: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejections:
    """Rows that give no prompt, for one reason.

    Attributes:
        count: How many.
        first_rows: The numbers of the first few.
    """

    count: int
    first_rows: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Preflight:
    """What the look at the rows found.

    Attributes:
        rows: Rows looked at.
        kept: Numbers of the rows that give prompts, in order.
        rejected: The others, by reason.
        lengths: Token lengths of the prompts.
        truncated: Prompts that the policy `truncate_left` cut.
        first: The first prompt, of epoch 0.
        complete: Whether these are all rows; False for a stream, of which only the first rows are looked at.
    """

    rows: int
    kept: Sequence[int]
    rejected: Mapping[str, Rejections]
    lengths: Lengths
    truncated: int
    first: Prompt
    complete: bool

    def lines(self) -> list[str]:
        """Write it for the console, one topic a line."""
        of_what = _count(self.rows, "row") if self.complete else f"the first {_count(self.rows, 'row')} of the stream"
        lengths = self.lengths
        lines = [
            f"prompts: {len(self.kept):,} from {of_what}",
            f"prompt tokens: {lengths.minimum:,} to {lengths.maximum:,}, mean {lengths.mean:,.1f}, 95 % up to {lengths.p95:,}",
        ]
        if self.truncated:
            lines.append(f"cut from the left: {_count(self.truncated, 'prompt')} to {lengths.maximum:,} tokens")
        lines.extend(f"left out: {text}" for text in _rejection_texts(self.rejected))
        return lines


@dataclass(kw_only=True, slots=True)
class _Survey:
    """Collects row numbers and lengths; of the prompts only the first is kept."""

    builder: PromptBuilder
    rows: int = 0
    kept: "array[int]" = field(default_factory=lambda: array("q"))
    lengths: list[int] = field(default_factory=list)
    rejected: dict[str, Rejections] = field(default_factory=dict)
    truncated: int = 0
    first: Prompt | None = None

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Look at the next rows."""
        numbers = range(self.rows, self.rows + len(rows))
        encoded = self.builder.encode(rows, (prompt_id(0, number) for number in numbers))
        for number, one in zip(numbers, encoded, strict=True):
            outcome = one if isinstance(one, Rejected) else self.builder.limit(one)
            if isinstance(outcome, Rejected):
                self._reject(number, outcome.reason)
                continue
            self.first = self.first or outcome
            self.kept.append(number)
            self.lengths.append(len(outcome.ids))
            self.truncated += outcome is not one
        self.rows += len(rows)

    def result(self, *, complete: bool) -> Preflight:
        """Sum up.

        Raises:
            DataError: If no row gives a prompt.
        """
        if self.first is None:
            reasons = "; ".join(_rejection_texts(self.rejected))
            raise DataError(
                f"dataset: none of {_count(self.rows, 'row')} gives a prompt: {reasons}"
                if self.rows
                else "dataset: it has no rows",
                hint="is `prompt` mapped to the right column in dataset.columns?" if self.rows else None,
            )
        ordered = sorted(self.lengths)
        return Preflight(
            rows=self.rows,
            kept=self.kept,
            rejected=self.rejected,
            lengths=Lengths(
                minimum=ordered[0],
                mean=sum(ordered) / len(ordered),
                p95=ordered[math.ceil(0.95 * len(ordered)) - 1],
                maximum=ordered[-1],
            ),
            truncated=self.truncated,
            first=self.first,
            complete=complete,
        )

    def _reject(self, number: int, reason: str) -> None:
        before = self.rejected.get(reason, Rejections(count=0, first_rows=()))
        self.rejected[reason] = Rejections(
            count=before.count + 1, first_rows=(*before.first_rows, number)[:_ROWS_SHOWN]
        )


def preflight(rows: Dataset, builder: PromptBuilder) -> Preflight:
    """Build every prompt once, to know which rows are usable and how long their prompts are.

    Raises:
        DataError: If there is no prompt column, a column has a reserved name, a row is unsound (see `PromptBuilder.build`), or
            none gives a prompt.
    """
    check_columns(rows.column_names)
    survey = _Survey(builder=builder)
    for batch in _row_batches(rows):
        survey.add(batch)
    return survey.result(complete=True)


def preflight_stream(rows: IterableDataset, builder: PromptBuilder, *, sample: int = STREAM_SAMPLE) -> Preflight:
    """Do the same for the first rows of a stream, in their order without shuffling.

    Raises:
        DataError: As `preflight`.
    """
    check_columns(column_names(rows))
    survey = _Survey(builder=builder)
    survey.add(list(islice(rows, sample)))
    return survey.result(complete=False)


def _row_batches(rows: Dataset) -> Iterator[list[dict[str, Any]]]:
    for columns in rows.iter(batch_size=_BATCH_ROWS):
        yield as_rows(columns)


def _rejection_texts(rejected: Mapping[str, Rejections]) -> list[str]:
    return [
        f"{_count(one.count, 'row')}, {reason} ({'row' if one.count == 1 else 'rows'} "
        f"{', '.join(map(str, one.first_rows))}{', ...' if one.count > len(one.first_rows) else ''})"
        for reason, one in rejected.items()
    ]


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
