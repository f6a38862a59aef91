"""Preflight: which rows stay, what it says of the others, and what it refuses."""

import statistics
from collections.abc import Callable

import pytest
from datasets import Dataset

from grpo_cli.data.preflight import preflight, preflight_stream
from grpo_cli.data.prompts import PromptBuilder
from grpo_cli.errors import DataError
from grpo_cli.recipe.schema.rewards import REWARD_ARGUMENTS

Builder = Callable[..., PromptBuilder]


def rows_of_lengths(lengths: list[int]) -> Dataset:
    """One token per byte: a prompt of n letters has n tokens."""
    return Dataset.from_dict({"prompt": ["x" * length for length in lengths]})


def looks(rows: Dataset, builder: PromptBuilder) -> tuple[Callable[[], object], ...]:
    """Both kinds of preflight, still to be done: of all rows, and of a stream of them."""
    return (lambda: preflight(rows, builder), lambda: preflight_stream(rows.to_iterable_dataset(), builder))


def test_usable_rows_stay_in_order_and_the_others_are_counted(builder: Builder) -> None:
    rows = Dataset.from_dict({"prompt": ["a", None, "b" * 9, "", "c", *[""] * 6]})
    found = preflight(rows, builder(max_prompt_length=8))
    assert list(found.kept) == [0, 4]
    assert {reason: (one.count, one.first_rows) for reason, one in found.rejected.items()} == {
        "prompt is null": (1, (1,)),
        "prompt is longer than 8 tokens": (1, (2,)),
        "prompt is empty": (7, (3, 5, 6, 7, 8)),
    }
    assert found.rows == len(found.kept) + sum(one.count for one in found.rejected.values())
    assert found.first == builder().build(rows[0], found.first.uid)


def test_lengths_are_those_of_the_prompts_across_batches(builder: Builder) -> None:
    lengths = [1 + (37 * index) % 101 for index in range(1100)]
    found = preflight(rows_of_lengths(lengths), builder()).lengths
    assert (found.minimum, found.maximum, found.mean) == (min(lengths), max(lengths), statistics.mean(lengths))
    covered = [sum(length <= limit for length in lengths) / len(lengths) for limit in (found.p95, found.p95 - 1)]
    assert covered[0] >= 0.95 > covered[1]


def test_lines_say_everything(builder: Builder) -> None:
    rows = Dataset.from_dict({"prompt": ["aa", "b" * 12, None, *[""] * 1200, "cccc"]})
    make = builder(max_prompt_length=10, max_prompt_length_policy="truncate_left")
    assert preflight(rows, make).lines() == [
        "prompts: 3 from 1,204 rows",
        "prompt tokens: 2 to 10, mean 5.3, 95 % up to 10",
        "cut from the left: 1 prompt to 10 tokens",
        "left out: 1 row, prompt is null (row 2)",
        "left out: 1,200 rows, prompt is empty (rows 3, 4, 5, 6, 7, ...)",
    ]


def test_a_stream_is_looked_at_from_its_start(builder: Builder) -> None:
    rows = rows_of_lengths(list(range(1, 101))).to_iterable_dataset()
    found = preflight_stream(rows, builder())
    assert found.lines()[0] == "prompts: 64 from the first 64 rows of the stream"
    assert found.lengths.maximum == 64
    assert not found.complete
    assert preflight_stream(rows, builder(), sample=3).rows == 3


@pytest.mark.parametrize("name", REWARD_ARGUMENTS)
def test_a_column_with_a_reserved_name_is_refused(builder: Builder, name: str) -> None:
    rows = Dataset.from_dict({"prompt": ["a"], name: ["b"]})
    for look in looks(rows, builder()):
        with pytest.raises(DataError, match=f"column `{name}` has the name of an argument") as raised:
            look()
        assert f"dataset.columns, such as `{{dataset_{name}: {name}}}`" in str(raised.value.hint)


def test_a_missing_prompt_column_is_found_before_any_row_is_read(builder: Builder) -> None:
    rows = Dataset.from_dict({"problem": ["a"]})
    for look in looks(rows, builder()):
        with pytest.raises(DataError, match="no column `prompt`; it has problem"):
            look()


def test_where_all_prompts_are_too_long_the_hint_is_their_length(builder: Builder) -> None:
    rows = Dataset.from_dict({"prompt": ["a prompt of several words"] * 2})
    with pytest.raises(
        DataError, match="none of 2 rows gives a prompt: 2 rows, prompt is longer than 1 tokens"
    ) as raised:
        preflight(rows, builder(max_prompt_length=1))
    assert str(raised.value.hint).startswith("raise dataset.max_prompt_length")


def test_a_dataset_without_usable_rows_is_refused_with_the_reasons(builder: Builder) -> None:
    rows = Dataset.from_dict({"prompt": ["", None, ""]})
    message = r"none of 3 rows gives a prompt: 2 rows, prompt is empty \(rows 0, 2\); 1 row, prompt is null \(row 1\)"
    with pytest.raises(DataError, match=message):
        preflight(rows, builder())
    with pytest.raises(DataError, match="it has no rows"):
        preflight(Dataset.from_dict({"prompt": []}), builder())


def test_an_unsound_row_is_named_by_its_number(builder: Builder) -> None:
    rows = Dataset.from_dict({"prompt": ["x"] * 600 + ["x" * 20]})
    with pytest.raises(DataError, match="row 600: the prompt has 20 tokens"):
        preflight(rows, builder(max_prompt_length=10, max_prompt_length_policy="error"))
