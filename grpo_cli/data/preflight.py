"""A look at all rows before anything is trained: which give prompts, how long they are, and what was left out and why."""

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from datasets import Dataset, IterableDataset

from grpo_cli.data.columns import as_rows, check_columns, column_names
from grpo_cli.data.prompts import PromptBuilder, Rejected, Rendered, hint_for, prompt_id
from grpo_cli.errors import DataError
from grpo_cli.types import Prompt

STREAM_SAMPLE = 64
"""Rows of a stream that are looked at."""

MEASURED = 256
"""Rows with images that are prepared before training; that takes many times longer than text does."""

_BATCH_ROWS = 512
_BATCH_ROWS_WITH_IMAGES = 32
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
class ImageCounts:
    """Images of the usable prompts.

    Attributes:
        prompts: Those that have some.
        fewest, most: Images of such a prompt.
        measured: Those of which the tokens are known.
        mean_tokens, most_tokens: Tokens that stand for images in one of these.
    """

    prompts: int
    fewest: int
    most: int
    measured: int
    mean_tokens: float
    most_tokens: int

    def line(self, prompts: int) -> str:
        """Write it for the console.

        Args:
            prompts: All usable ones.
        """
        each = f"{self.fewest}" if self.fewest == self.most else f"{self.fewest} to {self.most}"
        text = f"images: {self.prompts:,} of {_count(prompts, 'prompt')}, {each} each"
        if self.measured:
            text += f"; image tokens of a prompt: mean {self.mean_tokens:,.1f}, up to {self.most_tokens:,}"
        if self.measured < self.prompts:
            text += f", of {_count(self.measured, 'prompt')} that were prepared; the others are when they are drawn"
        return text


@dataclass(frozen=True, kw_only=True, slots=True)
class Preflight:
    """What the look at the rows found.

    Attributes:
        rows: Rows looked at.
        kept: Numbers of the rows that give prompts, in order.
        rejected: The others, by reason.
        lengths: Token lengths of the prompts that were prepared.
        unmeasured: Rows in `kept` that have images and were not prepared: they may turn out too long, or without images that can be used.
        images: Of the prompts; None: there are none.
        truncated: Prompts that the policy `truncate_left` cut.
        first: The first prompt, of epoch 0.
        first_with_images: The first of those that have some; None: there is none.
        complete: Whether these are all rows; False for a stream, of which only the first rows are looked at.
    """

    rows: int
    kept: Sequence[int]
    rejected: Mapping[str, Rejections]
    lengths: Lengths
    unmeasured: int
    images: ImageCounts | None
    truncated: int
    first: Prompt
    first_with_images: Prompt | None
    complete: bool

    def lines(self) -> list[str]:
        """Write it for the console, one topic a line."""
        of_what = _count(self.rows, "row") if self.complete else f"the first {_count(self.rows, 'row')} of the stream"
        lengths = self.lengths
        lines = [
            f"prompts: {len(self.kept):,} from {of_what}",
            f"prompt tokens: {lengths.minimum:,} to {lengths.maximum:,}, mean {lengths.mean:,.1f}, 95 % up to {lengths.p95:,}",
        ]
        if self.images is not None:
            lines.append(self.images.line(len(self.kept)))
        if self.truncated:
            lines.append(f"cut from the left: {_count(self.truncated, 'prompt')} to {lengths.maximum:,} tokens")
        lines.extend(f"left out: {text}" for text in _rejection_texts(self.rejected))
        return lines


@dataclass(kw_only=True, slots=True)
class _Survey:
    """Collects row numbers and lengths; of the prompts only the first is kept, and the first with images.

    Attributes:
        builder: Makes the prompts.
        every: Of rows with images, those whose number can be divided by it are prepared.
    """

    builder: PromptBuilder
    every: int = 1
    rows: int = 0
    kept: "array[int]" = field(default_factory=lambda: array("q"))
    lengths: list[int] = field(default_factory=list)
    rejected: dict[str, Rejections] = field(default_factory=dict)
    truncated: int = 0
    image_counts: list[int] = field(default_factory=list)
    image_tokens: list[int] = field(default_factory=list)
    first: Prompt | None = None
    first_with_images: Prompt | None = None

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Look at the next rows."""
        numbers = range(self.rows, self.rows + len(rows))
        rendered = self.builder.render(rows, (prompt_id(0, number) for number in numbers))
        texts = iter(self.builder.tokenize([one for one in rendered if not _has_images(one)]))
        for number, one in zip(numbers, rendered, strict=True):
            outcome: Rendered | Prompt | Rejected = one
            if not _has_images(one):
                outcome = self._measured(next(texts))
            elif self.first_with_images is None or number % self.every == 0:
                outcome = self._measured(self.builder.tokenize([one])[0])
            if isinstance(outcome, Rejected):
                self._reject(number, outcome.reason)
                continue
            self.kept.append(number)
            if outcome.images:
                self.image_counts.append(len(outcome.images))
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
                hint=hint_for(self.rejected) if self.rows else None,
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
            unmeasured=len(self.kept) - len(self.lengths),
            images=self._images(),
            truncated=self.truncated,
            first=self.first,
            first_with_images=self.first_with_images,
            complete=complete,
        )

    def _measured(self, encoded: Prompt | Rejected) -> Prompt | Rejected:
        """Take the length of a prompt within the limits."""
        outcome = encoded if isinstance(encoded, Rejected) else self.builder.limit(encoded)
        if isinstance(outcome, Prompt):
            self.first = self.first or outcome
            self.lengths.append(len(outcome.ids))
            self.truncated += outcome is not encoded
            if outcome.images:
                self.first_with_images = self.first_with_images or outcome
                self.image_tokens.append(self.builder.count_image_tokens(outcome))
        return outcome

    def _images(self) -> ImageCounts | None:
        if not self.image_counts:
            return None
        return ImageCounts(
            prompts=len(self.image_counts),
            fewest=min(self.image_counts),
            most=max(self.image_counts),
            measured=len(self.image_tokens),
            mean_tokens=sum(self.image_tokens) / max(1, len(self.image_tokens)),
            most_tokens=max(self.image_tokens, default=0),
        )

    def _reject(self, number: int, reason: str) -> None:
        before = self.rejected.get(reason, Rejections(count=0, first_rows=()))
        self.rejected[reason] = Rejections(
            count=before.count + 1, first_rows=(*before.first_rows, number)[:_ROWS_SHOWN]
        )


def preflight(rows: Dataset, builder: PromptBuilder, *, measured: int | None = MEASURED) -> Preflight:
    """Look at every row once, to know which are usable and how long their prompts are.

    Args:
        rows: The dataset.
        builder: Makes the prompts.
        measured: Rows with images that are prepared at most, evenly over the dataset; the others are taken to be usable. None: all.

    Raises:
        DataError: If there is no prompt column, a column has a reserved name, a row is unsound (see `PromptBuilder.build`), or
            none gives a prompt.
    """
    check_columns(rows.column_names)
    survey = _Survey(builder=builder, every=1 if measured is None else max(1, math.ceil(len(rows) / measured)))
    batch_size = _BATCH_ROWS if builder.vision is None else _BATCH_ROWS_WITH_IMAGES
    for columns in rows.iter(batch_size=batch_size):
        survey.add(as_rows(columns))
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


def _has_images(one: Rendered | Rejected) -> bool:
    return isinstance(one, Rendered) and bool(one.images)


def _rejection_texts(rejected: Mapping[str, Rejections]) -> list[str]:
    return [
        f"{_count(one.count, 'row')}, {reason} ({'row' if one.count == 1 else 'rows'} "
        f"{', '.join(map(str, one.first_rows))}{', ...' if one.count > len(one.first_rows) else ''})"
        for reason, one in rejected.items()
    ]


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
