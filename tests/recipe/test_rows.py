"""Rows of data files are counted as the writers of those formats mean them."""

import csv
import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from grpo_cli.recipe.rows import count_rows, matching_files

ROWS = [{"prompt": f"line one\nline two, {index}"} for index in range(7)]


def write(folder: Path, suffix: str) -> Path:
    path = folder / f"rows{suffix}"
    table = pa.Table.from_pylist(ROWS)
    if suffix == ".json":
        path.write_text(json.dumps(ROWS, indent=2))
    elif suffix == ".jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n\n" for row in ROWS))
    elif suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["prompt"])
            writer.writeheader()
            writer.writerows(ROWS)
    elif suffix == ".parquet":
        parquet.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table, max_chunksize=2)
    return path


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv", ".parquet", ".arrow"])
def test_rows_are_counted(suffix: str, tmp_path: Path) -> None:
    assert count_rows([write(tmp_path, suffix)], enough=100) == 7


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_counting_stops_when_there_are_enough(suffix: str, tmp_path: Path) -> None:
    assert count_rows([write(tmp_path, suffix)] * 2, enough=3) == 3


def test_rows_of_several_files_add_up(tmp_path: Path) -> None:
    assert count_rows([write(tmp_path, ".jsonl"), write(tmp_path, ".parquet")], enough=100) == 14


def test_json_lines_may_be_called_json(tmp_path: Path) -> None:
    path = tmp_path / "lines.json"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert count_rows([path], enough=100) == 2


def test_the_arrow_file_format_is_read_too(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(tmp_path / "rows.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    assert count_rows([tmp_path / "rows.arrow"], enough=100) == 7


def test_what_has_to_be_loaded_is_not_counted(tmp_path: Path) -> None:
    (tmp_path / "columns.json").write_text('{"data": [1, 2]}')
    assert count_rows([], enough=1) is None
    assert count_rows([tmp_path], enough=1) is None
    assert count_rows([tmp_path / "columns.json"], enough=1) is None


@pytest.mark.parametrize("suffix", [".json", ".parquet", ".arrow"])
def test_a_file_that_is_not_what_it_says_is_refused(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows{suffix}"
    path.write_text("not that")
    with pytest.raises(ValueError, match=r"."):
        count_rows([path], enough=1)


def test_files_are_looked_for_beside_the_recipe_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    for folder in (tmp_path, tmp_path / "recipes"):
        (folder / "a.csv").touch()
    (tmp_path / "b.csv").touch()
    assert matching_files("a.csv", tmp_path / "recipes") == [tmp_path / "recipes/a.csv"]
    assert matching_files("b.csv", tmp_path / "recipes") == [tmp_path / "b.csv"]
    assert matching_files("*.csv", tmp_path) == [tmp_path / "a.csv", tmp_path / "b.csv"]
    assert matching_files("c.csv", tmp_path) == []
