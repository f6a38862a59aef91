"""Prompts from a stream, whose rows are read as they come and counted only by reading them all."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from datasets import IterableDataset

from grpo_cli.data.columns import column_names
from grpo_cli.data.fingerprint import check_same_dataset, digest
from grpo_cli.data.prompts import PromptBuilder, Rejected, hint_for, prompt_id
from grpo_cli.errors import DataError
from grpo_cli.types import Prompt

_FINGERPRINT_ROWS = 4


class StreamingPromptSampler:
    """Draws the usable rows of a stream, again and again.

    Shuffling is the stream's own: its shards, and rows within a buffer. A row's number in a prompt's uid is its place in the
    shuffled stream. Resuming reads over the rows of the epoch that were consumed before, which is exact but not instant.

    Args:
        rows: The stream, not shuffled.
        builder: Makes prompts of its rows.
        seed: The run's.
        shuffle: Whether to shuffle.
        buffer_size: Rows that are shuffled among each other.
    """

    def __init__(
        self, rows: IterableDataset, builder: PromptBuilder, *, seed: int, shuffle: bool, buffer_size: int
    ) -> None:
        self._builder = builder
        self._stream = rows.shuffle(seed=seed, buffer_size=buffer_size) if shuffle else rows
        self._fingerprint = {
            "columns": column_names(rows),
            "content": digest(list(islice(rows, _FINGERPRINT_ROWS))),
            "prompt settings": builder.fingerprint(),
            "seed": seed,
            "shuffle": shuffle,
            "shuffle_buffer_size": buffer_size,
        }
        self._epoch = 0
        self._consumed = 0
        self._usable = 0
        self._rejected: Counter[str] = Counter()
        self._reader = self._read_epoch()

    @property
    def rows_per_epoch(self) -> None:
        """Unknown."""
        return

    @property
    def epoch(self) -> float:
        """Completed passes; the last prompt of a pass does not complete it, the one after does."""
        return float(self._epoch)

    @property
    def rejected(self) -> Mapping[str, int]:
        """Rows met so far that gave no prompt, by reason; in each epoch they count again."""
        return self._rejected

    def take(self, count: int, places: Sequence[int] | None = None) -> list[Prompt]:
        """Draw the next prompts, across the end of an epoch if need be; see `PromptSource`.

        All of them are built, whatever is asked for: which rows give none is known only then.

        Raises:
            DataError: If no row of a whole epoch gives a prompt, or the stream cannot be read.
        """
        prompts = [self._next_prompt() for _ in range(count)]
        return prompts if places is None else [prompts[place] for place in places]

    def state_dict(self) -> dict[str, Any]:
        """Describe the place in the stream, as JSON data."""
        return {
            "epoch": self._epoch,
            "consumed": self._consumed,
            "usable": self._usable,
            "rejected": dict(self._rejected),
            "fingerprint": dict(self._fingerprint),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a place described by `state_dict`.

        Raises:
            DataError: If the dataset is another one.
        """
        check_same_dataset(state["fingerprint"], self._fingerprint)
        self._epoch, self._usable = state["epoch"], state["usable"]
        self._rejected = Counter(state["rejected"])
        self._reader = self._read_epoch()
        self._consumed = 0
        for _ in range(state["consumed"]):
            if self._next_row() is None:
                raise DataError(
                    f"dataset: the stream ended after {self._consumed} rows; the checkpoint was made after {state['consumed']}",
                    hint="resume with the dataset of that run, or start a new run",
                )

    def _next_prompt(self) -> Prompt:
        """Read on until a row gives a prompt."""
        while True:
            row = self._next_row()
            if row is None:
                self._begin_next_epoch()
                continue
            uid = prompt_id(self._epoch, self._consumed - 1)
            outcome = self._builder.build(row, uid, passes_over_images=True)
            if not isinstance(outcome, Rejected):
                self._usable += 1
                return outcome
            self._rejected[outcome.reason] += 1

    def _next_row(self) -> Mapping[str, Any] | None:
        """Read a row; None at the end of the epoch."""
        try:
            row = next(self._reader, None)
        except Exception as error:  # the readers of `datasets` and functions of users raise anything
            raise DataError(
                f"dataset: reading row {self._consumed} of epoch {self._epoch} failed: "
                f"{type(error).__name__}: {' '.join(str(error).split())}"
            ) from error
        self._consumed += row is not None
        return row

    def _begin_next_epoch(self) -> None:
        if self._usable == 0:
            reasons = ", ".join(f"{reason} ({count:,})" for reason, count in self._rejected.most_common())
            raise DataError(
                f"dataset: no row of a whole epoch gives a prompt: {reasons or 'there are no rows'}",
                hint=hint_for(self._rejected),
            )
        self._epoch, self._consumed, self._usable = self._epoch + 1, 0, 0
        self._reader = self._read_epoch()

    def _read_epoch(self) -> Iterator[Mapping[str, Any]]:
        self._stream.set_epoch(self._epoch)
        return iter(self._stream)
