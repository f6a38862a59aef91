"""Every kind of source gives the rows that were written to it, mapped or streamed, and says what is wrong otherwise."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from grpo_cli.data.sources import load_rows
from grpo_cli.errors import DataError, RecipeError
from grpo_cli.recipe.schema import DatasetSection

ROWS = [{"prompt": f"question {index}", "answer": f"{index}!"} for index in range(7)]

FUNCTIONS = """
import datasets

ROWS = [{"prompt": f"question {index}", "answer": f"{index}!"} for index in range(7)]

def mapped(first=0):
    return datasets.Dataset.from_list(ROWS[first:])

def streamed():
    return datasets.Dataset.from_list(ROWS).to_iterable_dataset()

def nothing():
    return datasets.IterableDataset.from_generator(lambda: iter(()))

def plain():
    return ROWS

def several():
    return datasets.DatasetDict({"train": mapped()})

def broken():
    raise KeyError("level")

number = 3
"""


def load(folder: Path, name: str, **keys: Any) -> Any:
    return load_rows(DatasetSection(name=name, **keys), folder=folder)


def write_jsonl(path: Path, rows: list[dict[str, Any]] = ROWS) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_json(path: Path) -> None:
    path.write_text(json.dumps(ROWS))


def write_csv(path: Path) -> None:
    path.write_text("prompt,answer\n" + "".join(f"{row['prompt']},{row['answer']}\n" for row in ROWS))


def write_parquet(path: Path) -> None:
    Dataset.from_list(ROWS).to_parquet(path)


def write_arrow(path: Path) -> None:
    saved = path.parent / "saved-for-arrow"
    Dataset.from_list(ROWS).save_to_disk(saved)
    next(saved.glob("*.arrow")).rename(path)


WRITERS: dict[str, Callable[[Path], None]] = {
    "rows.jsonl": write_jsonl,
    "rows.json": write_json,
    "rows.csv": write_csv,
    "rows.parquet": write_parquet,
    "rows.arrow": write_arrow,
}


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of dataset functions beside the recipe."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "dataset_functions", raising=False)
    (tmp_path / "dataset_functions.py").write_text(FUNCTIONS)
    return "dataset_functions"


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", WRITERS)
def test_a_file_gives_the_rows_that_were_written(tmp_path: Path, name: str, streaming: bool) -> None:
    WRITERS[name](tmp_path / name)
    rows = load(tmp_path, name, streaming=streaming)
    assert isinstance(rows, IterableDataset if streaming else Dataset)
    assert list(rows) == ROWS


@pytest.mark.parametrize("streaming", [False, True])
def test_a_glob_gives_the_rows_of_its_files_in_order_of_name(tmp_path: Path, streaming: bool) -> None:
    (tmp_path / "parts").mkdir()
    for index in reversed(range(7)):
        write_jsonl(tmp_path / "parts" / f"{index}.jsonl", [ROWS[index]])
    assert list(load(tmp_path, "parts/*.jsonl", streaming=streaming)) == ROWS


@pytest.mark.parametrize("streaming", [False, True])
def test_a_saved_dataset_gives_its_rows(tmp_path: Path, streaming: bool) -> None:
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    rows = load(tmp_path, "saved", streaming=streaming)
    assert isinstance(rows, IterableDataset if streaming else Dataset)
    assert list(rows) == ROWS


def test_a_saved_dataset_with_splits_gives_the_one_asked_for(tmp_path: Path) -> None:
    parts = DatasetDict({"train": Dataset.from_list(ROWS[:4]), "test": Dataset.from_list(ROWS[4:])})
    parts.save_to_disk(tmp_path / "saved")
    assert list(load(tmp_path, "saved", split="test")) == ROWS[4:]
    assert list(load(tmp_path, "saved", split="test+train[:2]")) == ROWS[4:] + ROWS[:2]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_folder_of_data_files_has_the_splits_of_its_file_names(tmp_path: Path, streaming: bool) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", ROWS[:5])
    write_jsonl(folder / "test.jsonl", ROWS[5:])
    assert list(load(tmp_path, "data", streaming=streaming)) == ROWS[:5]
    assert list(load(tmp_path, "data", split="test", streaming=streaming)) == ROWS[5:]


def test_a_function_gives_its_rows_and_gets_the_arguments(tmp_path: Path, functions: str) -> None:
    assert list(load(tmp_path, f"{functions}.mapped")) == ROWS
    assert list(load(tmp_path, f"{functions}.mapped", arguments={"first": 5})) == ROWS[5:]
    streamed = load(tmp_path, f"{functions}.streamed")
    assert isinstance(streamed, IterableDataset)
    assert list(streamed) == ROWS


def test_a_function_that_returns_a_dataset_can_be_streamed_and_sliced(tmp_path: Path, functions: str) -> None:
    streamed = load(tmp_path, f"{functions}.mapped", streaming=True)
    assert isinstance(streamed, IterableDataset)
    assert list(streamed) == ROWS
    assert list(load(tmp_path, f"{functions}.mapped", split="train[2:4]")) == ROWS[2:4]


def test_the_recipe_folder_comes_before_the_working_folder(tmp_path: Path, _other_working_folder: Path) -> None:  # noqa: PT019  its value is the folder
    write_jsonl(_other_working_folder / "rows.jsonl", ROWS[:1])
    assert list(load(tmp_path, "rows.jsonl")) == ROWS[:1]
    write_jsonl(tmp_path / "rows.jsonl", ROWS[1:])
    assert list(load(tmp_path, "rows.jsonl")) == ROWS[1:]


@pytest.mark.parametrize(
    ("split", "expected"), [("train[:3]", ROWS[:3]), ("train[-2:]", ROWS[-2:]), ("train[3:5]", ROWS[3:5])]
)
def test_a_split_can_be_sliced(tmp_path: Path, split: str, expected: list[dict[str, str]]) -> None:
    write_jsonl(tmp_path / "rows.jsonl")
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    assert list(load(tmp_path, "rows.jsonl", split=split)) == expected
    assert list(load(tmp_path, "saved", split=split)) == expected


@pytest.mark.parametrize("streaming", [False, True])
def test_max_rows_keeps_the_first_rows(tmp_path: Path, streaming: bool) -> None:
    write_jsonl(tmp_path / "rows.jsonl")
    assert list(load(tmp_path, "rows.jsonl", streaming=streaming, max_rows=3)) == ROWS[:3]
    assert list(load(tmp_path, "rows.jsonl", streaming=streaming, max_rows=100)) == ROWS


@pytest.mark.parametrize("streaming", [False, True])
def test_columns_are_renamed_and_may_swap_names(tmp_path: Path, streaming: bool) -> None:
    write_jsonl(tmp_path / "rows.jsonl")
    renamed = load(tmp_path, "rows.jsonl", streaming=streaming, columns={"ground_truth": "answer", "prompt": "prompt"})
    assert list(renamed) == [{"prompt": row["prompt"], "ground_truth": row["answer"]} for row in ROWS]
    swapped = load(tmp_path, "rows.jsonl", streaming=streaming, columns={"prompt": "answer", "answer": "prompt"})
    assert list(swapped) == [{"prompt": row["answer"], "answer": row["prompt"]} for row in ROWS]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("columns", "message", "hint"),
    [
        (
            {"prompt": "answr"},
            "dataset.columns: prompt: no column `answr`; it has prompt, answer",
            "did you mean `answer`?",
        ),
        ({"prompt": "answer"}, "`answer` cannot be called `prompt`: there is a column", "original_prompt: prompt"),
        ({"a": "answer", "b": "answer"}, "column `answer` is given more than one name", None),
    ],
)
def test_a_wrong_column_is_named(
    tmp_path: Path, streaming: bool, columns: dict[str, str], message: str, hint: str | None
) -> None:
    write_jsonl(tmp_path / "rows.jsonl")
    with pytest.raises(DataError) as raised:
        load(tmp_path, "rows.jsonl", streaming=streaming, columns=columns)
    assert message in raised.value.message
    assert hint is None or hint in str(raised.value.hint)


def test_a_missing_file_names_the_nearest_one(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "prompts.jsonl")
    with pytest.raises(DataError, match=r"promts\.jsonl does not exist; paths are taken from") as raised:
        load(tmp_path, "promts.jsonl")
    assert raised.value.hint == "did you mean `prompts.jsonl`?"
    with pytest.raises(DataError, match=r"nowhere/\*\.parquet does not exist"):
        load(tmp_path, "nowhere/*.parquet")


def test_files_of_two_formats_or_of_none_are_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl")
    write_csv(tmp_path / "rows.csv")
    with pytest.raises(DataError, match=r"found \.csv, \.jsonl; allowed: files of one format among \.json, \.jsonl"):
        load(tmp_path, "rows.*")
    (tmp_path / "rows.pkl").write_text("")
    with pytest.raises(DataError, match=r"found \.pkl; allowed"):
        load(tmp_path, "rows.pkl")


def test_an_unreadable_file_says_why(tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text('{"prompt": "x"\n')
    with pytest.raises(DataError, match=r"dataset\.name: broken\.jsonl: JSON parse error"):
        load(tmp_path, "broken.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match=r"empty\.jsonl has no rows"):
        load(tmp_path, "empty.jsonl")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(DataError, match="doesn't contain any data files"):
        load(tmp_path, "nothing")
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    (tmp_path / "saved" / "state.json").write_text("{")
    with pytest.raises(DataError, match=r"dataset\.name: saved: Expecting property name"):
        load(tmp_path, "saved")


def test_a_stream_without_rows_says_so(tmp_path: Path, functions: str) -> None:
    with pytest.raises(DataError, match="it has no rows"):
        load(tmp_path, f"{functions}.nothing", columns={"prompt": "question"})


def test_an_unknown_configuration_lists_those_that_exist(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "train.jsonl")
    with pytest.raises(DataError, match=r"BuilderConfig 'easy' not found\. Available: \['default'\]") as raised:
        load(tmp_path, "data", config="easy")
    assert raised.value.hint == "choose one of these in dataset.config"


@pytest.mark.parametrize("name", ["rows.jsonl", "saved", "dataset_functions.mapped"])
def test_an_unknown_split_lists_those_that_exist(tmp_path: Path, functions: str, name: str) -> None:
    write_jsonl(tmp_path / "rows.jsonl")
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match=r"Unknown split \"trian\"\. Should be one of \['train'\]") as raised:
        load(tmp_path, name, split="trian")
    assert raised.value.hint in {"choose one of these in dataset.split", "did you mean `train`?"}


def test_a_text_that_is_no_split_is_refused(tmp_path: Path, functions: str) -> None:
    with pytest.raises(DataError, match=r"dataset\.split: Unrecognized instruction format: train\["):
        load(tmp_path, f"{functions}.mapped", split="train[")
    with pytest.raises(DataError, match=r"dataset\.split: found test, but .* returns one streaming dataset"):
        load(tmp_path, f"{functions}.streamed", split="test")


def test_a_slice_of_a_stream_is_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match=r"found train\[:3\]; a streaming dataset has whole splits only") as raised:
        load(tmp_path, "rows.jsonl", split="train[:3]", streaming=True)
    assert "dataset.max_rows" in str(raised.value.hint)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("plain", "returned a list; allowed: a datasets.Dataset or datasets.IterableDataset"),
        ("several", "returned a datasets.dataset_dict.DatasetDict; allowed"),
        ("broken", "dataset_functions.broken raised KeyError: 'level'"),
        ("number", "dataset_functions.number is a int; allowed: a function"),
    ],
)
def test_a_function_that_does_not_give_a_dataset_is_refused(
    tmp_path: Path, functions: str, function: str, message: str
) -> None:
    with pytest.raises(DataError) as raised:
        load(tmp_path, f"{functions}.{function}")
    assert message in raised.value.message


def test_a_function_called_with_unknown_arguments_is_named(tmp_path: Path, functions: str) -> None:
    with pytest.raises(DataError, match="unexpected keyword argument 'frist'") as raised:
        load(tmp_path, f"{functions}.mapped", arguments={"frist": 1})
    assert "dataset.arguments" in str(raised.value.hint)


def test_a_misspelled_function_is_a_recipe_error(tmp_path: Path, functions: str) -> None:
    with pytest.raises(RecipeError, match="did you mean `mapped`"):
        load(tmp_path, f"{functions}.maped")


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("rows.jsonl", {"arguments": {"a": 1}}),
        ("rows.jsonl", {"config": "main"}),
        ("rows.jsonl", {"revision": "main"}),
        ("dataset_functions.mapped", {"revision": "main"}),
        ("someone/something", {"arguments": {"a": 1}}),
    ],
)
def test_a_key_that_would_be_ignored_is_refused(
    tmp_path: Path, functions: str, name: str, keys: dict[str, Any]
) -> None:
    write_jsonl(tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match=rf"dataset\.{next(iter(keys))}: {name} is .*, which has none"):
        load(tmp_path, name, **keys)


def test_a_hub_dataset_that_cannot_be_reached_says_what_to_check(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"dataset\.name: nobody/nothing: Couldn't reach") as raised:
        load(tmp_path, "nobody/nothing")
    assert "check the network" in str(raised.value.hint)
