"""Rows of local data files, counted no further than needed and without loading a dataset library."""

import csv
import glob
import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

_LARGEST_JSON = 32 * 2**20
"""Bytes of a `.json` file that is read as a whole to count its rows; a larger one has enough."""


def is_local(name: str) -> bool:
    """Tell whether a dataset's name can only be a local file or folder."""
    return name.startswith((".", "/", "~")) or Path(name).suffix in _COUNTERS or glob.has_magic(name)


def matching_files(name: str, folder: Path) -> list[Path]:
    """Find the file, the folder or the matches of a glob; the recipe's folder comes before the working folder.

    Args:
        name: As the recipe says.
        folder: The recipe's folder.
    """
    for base in (folder, Path.cwd()):
        path = base / Path(name).expanduser()
        if path.exists():
            return [path]
        if glob.has_magic(name):
            matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]  # noqa: PTH207  absolute patterns too
            if matches:
                return matches
    return []


def count_rows(files: list[Path], *, enough: int) -> int | None:
    """Count the rows of data files up to `enough`.

    Returns:
        The number of rows, or `enough` if there are at least as many; None if it cannot be told without loading the data.

    Raises:
        OSError: If a file cannot be opened.
        ValueError: If a file is not what its suffix says.
    """
    if not files or any(not path.is_file() or path.suffix not in _COUNTERS for path in files):
        return None
    total = 0
    for path in files:
        if total >= enough:
            break
        rows = _COUNTERS[path.suffix](path, enough - total)
        if rows is None:
            return None
        total += rows
    return total


def first_rows(files: list[Path], count: int) -> list[dict[str, Any]]:
    """Read the first rows of data files of one format.

    Returns:
        Up to `count`; none if it is not a file that `count_rows` can read.

    Raises:
        OSError: If the first file cannot be opened.
        ValueError: If it is not what its suffix says.
    """
    if not files or not files[0].is_file() or files[0].suffix not in _READERS:
        return []
    rows = islice(_READERS[files[0].suffix](files[0], count), count)
    return [row for row in rows if isinstance(row, dict)]


def _read_json_lines(path: Path, count: int) -> Iterator[Any]:
    with path.open(encoding="utf-8-sig") as file:
        yield from map(json.loads, islice((line for line in file if line.strip()), count))


def _read_json(path: Path, _count: int) -> Iterator[Any]:
    yield from _json_rows(path) or ()


def _read_csv(path: Path, _count: int) -> Iterator[Any]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            yield from csv.DictReader(file)
        except csv.Error as error:
            raise ValueError(str(error)) from error


def _read_parquet(path: Path, count: int) -> Iterator[Any]:
    from pyarrow import parquet  # noqa: PLC0415  as above

    for batch in parquet.ParquetFile(path).iter_batches(batch_size=count):
        yield from batch.to_pylist()


def _read_arrow(path: Path, count: int) -> Iterator[Any]:
    for batch in _arrow_batches(path):
        yield from batch.slice(0, count).to_pylist()


def _json_lines(path: Path, enough: int) -> int:
    with path.open(encoding="utf-8-sig") as file:
        return sum(1 for _ in islice((line for line in file if line.strip()), enough))


def _json(path: Path, enough: int) -> int | None:
    rows = _json_rows(path)
    return None if rows is None else min(len(rows), enough)


def _json_rows(path: Path) -> list[Any] | None:
    """Read a list of rows, or lines if the file holds one object a line; None: it is neither, or too large to be read as a whole."""
    if path.stat().st_size > _LARGEST_JSON:
        return None
    text = path.read_text(encoding="utf-8-sig")
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return [json.loads(line) for line in text.split("\n") if line.strip()]
        raise
    return rows if isinstance(rows, list) else None


def _csv(path: Path, enough: int) -> int:
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            rows = sum(1 for _ in islice((row for row in csv.reader(file) if row), enough + 1))
        except csv.Error as error:
            raise ValueError(str(error)) from error
    return max(rows - 1, 0)


def _parquet(path: Path, _enough: int) -> int:
    from pyarrow import parquet  # noqa: PLC0415  takes longer to import than all other checks together

    return int(parquet.read_metadata(path).num_rows)


def _arrow(path: Path, enough: int) -> int:
    total = 0
    for batch in _arrow_batches(path):
        total += batch.num_rows
        if total >= enough:
            break
    return total


def _arrow_batches(path: Path) -> Iterator[Any]:
    """Give each record batch; both the file and the stream format occur."""
    import pyarrow as pa  # noqa: PLC0415  as above

    with pa.memory_map(str(path)) as source:
        try:
            reader = pa.ipc.open_file(source)
        except pa.ArrowInvalid:
            source.seek(0)
            yield from pa.ipc.open_stream(source)
            return
        yield from (reader.get_batch(index) for index in range(reader.num_record_batches))


_COUNTERS: dict[str, Callable[[Path, int], int | None]] = {
    ".json": _json,
    ".jsonl": _json_lines,
    ".csv": _csv,
    ".parquet": _parquet,
    ".arrow": _arrow,
}

_READERS: dict[str, Callable[[Path, int], Iterator[Any]]] = {
    ".json": _read_json,
    ".jsonl": _read_json_lines,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
