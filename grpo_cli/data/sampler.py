"""Prompts in an order that is a function of the seed and the epoch alone, so that a run can be resumed anywhere.

Epochs follow each other without a gap: the rows left at the end of one go before the first of the next, and every row is drawn
once in each. Where a run ends is not decided here.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from datasets import Dataset
from torch import Tensor

from grpo_cli.data.columns import as_rows
from grpo_cli.data.fingerprint import check_same_dataset, digest
from grpo_cli.data.preflight import Preflight
from grpo_cli.data.prompts import PromptBuilder, Rejected, prompt_id
from grpo_cli.errors import DataError
from grpo_cli.types import Prompt

_FINGERPRINT_ROWS = 8


class PromptSource(Protocol):
    """Gives prompts without end; see `PromptSampler` and `StreamingPromptSampler`."""

    @property
    def rows_per_epoch(self) -> int | None:
        """Prompts of one epoch; None for a stream."""
        ...

    @property
    def epoch(self) -> float:
        """Passes over the dataset so far, as a fraction; for a stream, passes that were completed."""
        ...

    @property
    def rejected(self) -> Mapping[str, int]:
        """Rows that gave no prompt, by reason."""
        ...

    def take(self, count: int, places: Sequence[int] | None = None) -> list[Prompt]:
        """Draw the next prompts, across the end of an epoch if need be.

        Args:
            count: How many.
            places: Which of them to give, as numbers below `count`; None: all. The others count as drawn, and none of them is built if
                that can be helped.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Describe the place in the dataset, as JSON data."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a place described by `state_dict`.

        Raises:
            DataError: If the dataset is another one.
        """
        ...


class PromptSampler:
    """Draws the usable rows of a map-style dataset.

    Args:
        rows: The dataset.
        builder: Makes prompts of them.
        found: The preflight of these rows with this builder.
        seed: The run's.
        shuffle: A random order in each epoch, or the dataset's own.
    """

    def __init__(self, rows: Dataset, builder: PromptBuilder, found: Preflight, *, seed: int, shuffle: bool) -> None:
        self._rows = rows
        self._builder = builder
        self._kept = found.kept
        self._rejected = Counter({reason: one.count for reason, one in found.rejected.items()})
        self._unmeasured = found.unmeasured
        self._seed = seed
        self._shuffle = shuffle
        self._drawn = 0
        self._order_of: tuple[int, range | Tensor] = (-1, range(0))

    @property
    def rows_per_epoch(self) -> int:
        """Usable rows."""
        return len(self._kept)

    @property
    def epoch(self) -> float:
        """Prompts drawn over usable rows."""
        return self._drawn / len(self._kept)

    @property
    def rejected(self) -> Mapping[str, int]:
        """Rows of the dataset that give no prompt, by reason; those that were passed over when drawn count each time."""
        return self._rejected

    def take(self, count: int, places: Sequence[int] | None = None) -> list[Prompt]:
        """Draw the next prompts, across the end of an epoch if need be; see `PromptSource`.

        Rows whose images turn out to make the prompt too long, or cannot be used, are passed over, and counted; where that may be, all are
        built, so that every process knows which rows are.
        """
        if places is not None and not self._unmeasured:
            prompts = self._draw([range(count)[place] for place in places])
            self._drawn += count
            return prompts
        prompts = []
        while missing := count - len(
            prompts
        ):  # it ends: one row at least has given a prompt, and it tells if images are gone
            prompts += self._draw(range(missing))
            self._drawn += missing
        return prompts if places is None else [prompts[place] for place in places]

    def state_dict(self) -> dict[str, Any]:
        """Describe the place in the dataset, as JSON data."""
        return {"drawn": self._drawn, "fingerprint": self._fingerprint()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a place described by `state_dict`.

        Raises:
            DataError: If the dataset is another one.
        """
        check_same_dataset(state["fingerprint"], self._fingerprint())
        self._drawn = state["drawn"]

    def _draw(self, places: Sequence[int]) -> list[Prompt]:
        """Build some of the next rows; they give as many prompts, but for those that nobody has prepared before."""
        following = [divmod(self._drawn + place, len(self._kept)) for place in places]
        draws = [(epoch, self._kept[int(self._order(epoch)[place])]) for epoch, place in following]
        # Read and tokenized together, which is several times faster than one by one.
        rows = as_rows(self._rows[[row for _, row in draws]])
        uids = [prompt_id(epoch, row) for epoch, row in draws]
        encoded = self._builder.encode(rows, uids, passes_over_images=bool(self._unmeasured))
        outcomes = (self._limited(one, row) for one, (_, row) in zip(encoded, draws, strict=True))
        return [prompt for prompt in outcomes if prompt is not None]

    def _limited(self, encoded: Prompt | Rejected, row: int) -> Prompt | None:
        """Apply the length policy. A row in the order gave a prompt before, or has images that are opened only now."""
        outcome = encoded if isinstance(encoded, Rejected) else self._builder.limit(encoded)
        if isinstance(outcome, Prompt):
            return outcome
        of_images = encoded.of_images if isinstance(encoded, Rejected) else bool(encoded.images)
        if self._unmeasured and of_images:
            self._rejected[outcome.reason] += 1
            return None
        raise DataError(
            f"dataset: row {row} gave a prompt when all rows were read, and now {outcome.reason}",
            hint="a transform set on the dataset must give the same row every time",
        )

    def _order(self, epoch: int) -> range | Tensor:
        """Order the usable rows, as numbers among them, for an epoch; the latest order is kept.

        It is the one thing here that grows with the dataset: 4 bytes a row.
        """
        if self._order_of[0] != epoch:
            size = len(self._kept)
            order: range | Tensor = range(size)
            if self._shuffle:
                generator = torch.Generator().manual_seed(epoch_seed(self._seed, epoch))
                dtype = torch.int32 if size < 2**31 else torch.int64  # the same order
                order = torch.randperm(size, generator=generator, dtype=dtype)
            self._order_of = (epoch, order)
        return self._order_of[1]

    def _fingerprint(self) -> dict[str, Any]:
        total = len(self._rows)
        spread = sorted({index * (total - 1) // (_FINGERPRINT_ROWS - 1) for index in range(_FINGERPRINT_ROWS)})
        return {
            "rows": total,
            "usable rows": len(self._kept),
            "columns": list(self._rows.column_names),
            "content": digest([self._rows[index] for index in spread]),
            "prompt settings": self._builder.fingerprint(),
            "seed": self._seed,
            "shuffle": self._shuffle,
        }


def epoch_seed(seed: int, epoch: int) -> int:
    """Derive the seed of an epoch's order; the same on every machine and in every version."""
    return int.from_bytes(hashlib.sha256(f"order of seed {seed}, epoch {epoch}".encode()).digest()[:8], "big") >> 1
