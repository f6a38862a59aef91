"""Columns of a dataset: their names, `columns:` mapping, and names that rewards need for themselves."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from datasets import Dataset, IterableDataset

from grpo_cli.errors import DataError
from grpo_cli.recipe.schema.rewards import REWARD_ARGUMENTS
from grpo_cli.recipe.suggest import nearest

PROMPT = "prompt"
"""The column that prompts are read from."""

_RowsT = TypeVar("_RowsT", Dataset, IterableDataset)


def column_names(rows: Dataset | IterableDataset) -> list[str]:
    """List the columns; those of a stream that does not declare them are the first row's.

    Raises:
        DataError: If a stream has no rows.
    """
    names = rows.column_names
    if names is None:
        first = next(iter(rows), None)
        if first is None:
            raise DataError("dataset: it has no rows")
        names = first.keys()
    return list(names)


def as_rows(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Turn what a dataset gives for several rows, a list for each column, into rows."""
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def rename_columns(rows: _RowsT, columns: Mapping[str, str]) -> _RowsT:
    """Rename columns; two of them may swap their names.

    Args:
        rows: The dataset.
        columns: New name to present name.

    Raises:
        DataError: If a present name is not there or is used twice, or a new name is taken.
    """
    renamed = {old: new for new, old in columns.items() if new != old}
    if not columns:
        return rows
    there = column_names(rows)
    for new, old in columns.items():
        if old not in there:
            raise DataError(f"dataset.columns: {new}: {_no_column(old, there)}", hint=_guess(old, there))
        if list(columns.values()).count(old) > 1:
            raise DataError(f"dataset.columns: column `{old}` is given more than one name; allowed: one")
        if new in there and new not in columns.values():
            raise DataError(
                f"dataset.columns: `{old}` cannot be called `{new}`: there is a column of that name",
                hint=f"rename that one too, such as `{{{new}: {old}, original_{new}: {new}}}`",
            )
    if not set(renamed) & set(renamed.values()):
        return rows.rename_columns(renamed) if renamed else rows
    # A stream renames row by row and would find the other column's name taken; by way of free names it does not.
    free = {old: f"_{index}_{old}" for index, old in enumerate(renamed)}
    return rows.rename_columns(free).rename_columns({free[old]: new for old, new in renamed.items()})


def check_columns(names: Iterable[str]) -> None:
    """Check that there is a prompt column and that no column has a reserved name.

    Raises:
        DataError: Otherwise.
    """
    there = list(names)
    if PROMPT not in there:
        raise missing_prompt(there)
    taken = [name for name in there if name in REWARD_ARGUMENTS]
    if taken:
        raise DataError(
            f"dataset: column `{taken[0]}` has the name of an argument that reward functions get; "
            f"reserved: {', '.join(REWARD_ARGUMENTS)}",
            hint=f"rename it in dataset.columns, such as `{{dataset_{taken[0]}: {taken[0]}}}`",
        )


def missing_prompt(names: Iterable[str]) -> DataError:
    """Say that there is no prompt column, and which column it may be."""
    there = list(names)
    candidate = nearest(PROMPT, there) or next((name for name in _USUAL_PROMPTS if name in there), None)
    example = candidate or "your_column"
    return DataError(
        f"dataset: {_no_column(PROMPT, there)}", hint=f"name it in dataset.columns, such as `{{prompt: {example}}}`"
    )


_USUAL_PROMPTS = ("question", "problem", "instruction", "messages", "query", "input", "text")


def _no_column(name: str, there: list[str]) -> str:
    return f"no column `{name}`; it has {', '.join(there) or 'no columns'}"


def _guess(name: str, there: list[str]) -> str | None:
    found = nearest(name, there)
    return None if found is None else f"did you mean `{found}`?"
