"""What was measured on the completions of one dataset, prompt by prompt.

Letters in shapes: P prompts, G completions of a prompt, F reward functions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Floats = npt.NDArray[np.float64]
Booleans = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sheet:
    """The completions of a dataset in numbers.

    Attributes:
        uids: Names of the prompts [P].
        reward_names: Of the reward functions [F].
        reward_weights: Theirs [F].
        rewards: [P, G, F]; NaN: the function did not apply.
        lengths: Tokens [P, G].
        truncated: [P, G], whether a completion was cut at the length limit.
        answers: [P][G], None where a completion has none; None: it is not known how they are found.
    """

    uids: tuple[str, ...]
    reward_names: tuple[str, ...]
    reward_weights: tuple[float, ...]
    rewards: Floats
    lengths: Floats
    truncated: Booleans
    answers: tuple[tuple[str | None, ...], ...] | None

    @classmethod
    def from_table(
        cls, table: pa.Table, *, reward_names: Sequence[str], reward_weights: Sequence[float], answers: str | None
    ) -> Self:
        """Read a table of completions, as the completion files have it: prompts one after another, all with equally many completions.

        Args:
            table: Columns prompt_uid, num_tokens, finish_reason and reward/{name}.
            reward_names: Of the reward functions.
            reward_weights: Theirs.
            answers: Name of the column with the answers; None, or one that is not there: they are not known.
        """
        row_uids = table.column("prompt_uid").to_pylist()
        uids = tuple(dict.fromkeys(row_uids))
        shape = (len(uids), len(row_uids) // max(1, len(uids)))
        assert shape[0] * shape[1] == len(row_uids), "all prompts have equally many completions"
        columns = [_floats(table.column(f"reward/{name}")) for name in reward_names]
        answered = None if answers is None or answers not in table.column_names else table.column(answers).to_pylist()
        return cls(
            uids=uids,
            reward_names=tuple(reward_names),
            reward_weights=tuple(reward_weights),
            rewards=np.stack([column.reshape(shape) for column in columns], axis=-1),
            lengths=_floats(table.column("num_tokens")).reshape(shape),
            truncated=np.array([reason == "length" for reason in table.column("finish_reason").to_pylist()]).reshape(
                shape
            ),
            answers=None if answered is None else _by_prompt(answered, shape[1]),
        )

    @property
    def num_generations(self) -> int:
        """Completions of a prompt."""
        return int(self.lengths.shape[1])


def _floats(column: pa.ChunkedArray) -> Floats:
    """Read numbers; null becomes NaN."""
    values = [np.nan if value is None else value for value in column.to_pylist()]
    return np.array(values, dtype=np.float64)


def _by_prompt(answers: Sequence[Any], size: int) -> tuple[tuple[str | None, ...], ...]:
    """Put the answers of each prompt's completions together, as text: a vote is for what reads the same."""
    texts = [None if answer is None else str(answer) for answer in answers]
    return tuple(tuple(texts[start : start + size]) for start in range(0, len(texts), size))
