"""From the recipe's `dataset:` to rows.

A name is tried as a local file, glob or folder, then as the dotted path of a function, then as a hub id. No code comes with a
dataset: `datasets` runs none, and a function is one that the recipe names.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias, cast

from datasets import (
    Dataset,
    DatasetDict,
    IterableDataset,
    ReadInstruction,
    concatenate_datasets,
    load_dataset,
    load_from_disk,
)
from datasets.config import HF_DATASETS_CACHE
from huggingface_hub.constants import HF_HUB_CACHE

from grpo_cli.data.columns import rename_columns
from grpo_cli.data.image_columns import undecoded
from grpo_cli.data.images import ImagePlaces
from grpo_cli.errors import DataError, GrpoError
from grpo_cli.hub import stay_offline_without_network
from grpo_cli.recipe.imports import is_dotted_path, resolve
from grpo_cli.recipe.rows import is_local, matching_files
from grpo_cli.recipe.schema import DatasetSection
from grpo_cli.recipe.suggest import did_you_mean

Rows: TypeAlias = Dataset | IterableDataset
"""A map-style dataset, or a streaming one."""

FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
"""Suffix of a data file to the reader of `datasets` for it."""

_ONLY_SPLIT = "train"
"""What `datasets` calls the one split of a source that has no splits."""


def load_rows(section: DatasetSection, *, folder: Path) -> Rows:
    """Load the rows that a recipe names, with columns renamed and only the first `max_rows` of them.

    Args:
        section: The recipe's `dataset:`, or its `eval.dataset:`.
        folder: The recipe's folder. Local paths and dotted paths are looked for there, then in the working folder.

    Returns:
        A `Dataset`; an `IterableDataset` with `streaming`, or if the named function returns one. Images of prompts are not decoded.

    Raises:
        DataError: If there is no such dataset, it cannot be read, or it has no such split or column.
        RecipeError: If the module of a dotted path cannot be imported.
    """
    if section.streaming and "[" in section.split:
        raise DataError(
            f"dataset.split: found {section.split}; a streaming dataset has whole splits only",
            hint="use dataset.max_rows for the first rows, or turn dataset.streaming off",
        )
    rows = undecoded(rename_columns(_load(section, folder), section.columns))
    if section.max_rows is None:
        return rows
    if isinstance(rows, IterableDataset):
        return rows.take(section.max_rows)
    return rows.select(range(min(section.max_rows, len(rows))))


def image_places(section: DatasetSection, *, folder: Path) -> ImagePlaces:
    """Tell where paths of images lead: relative ones to the folders of the data files, the recipe's, and the working folder."""
    files = matching_files(section.name, folder)
    beside = (path if path.is_dir() else path.parent for path in files)
    folders = tuple(dict.fromkeys(place.absolute() for place in (*beside, folder, Path.cwd())))
    if files or is_local(section.name) or is_dotted_path(section.name, folder):
        return ImagePlaces(folders=folders)
    caches = (HF_DATASETS_CACHE, HF_HUB_CACHE)  # where the files of a folder of images are when they have come
    return ImagePlaces(folders=folders, own_folders=tuple(Path(place).absolute() for place in caches))


def _load(section: DatasetSection, folder: Path) -> Rows:
    """Decide what the name is, and load it."""
    files = matching_files(section.name, folder)
    if files:
        _refuse(section, "arguments", "revision", kind="a local dataset")
        return _from_folder(files[0], section) if files[0].is_dir() else _from_files(files, section)
    if is_local(section.name):
        raise _no_such_file(section.name, folder)
    if is_dotted_path(section.name, folder):
        _refuse(section, "config", "revision", kind="a function")
        return _from_function(resolve(section.name, folder), section)
    _refuse(section, "arguments", kind="a hub dataset")
    stay_offline_without_network()
    return _read(section, section.name, section.config, revision=section.revision)


def _from_files(files: list[Path], section: DatasetSection) -> Rows:
    """Read data files of one format."""
    _refuse(section, "config", kind="a data file")
    suffixes = sorted({file.suffix for file in files})
    formats = {FORMATS.get(suffix) for suffix in suffixes}
    reader = formats.pop()
    if reader is None or formats:
        raise DataError(
            f"dataset.name: {section.name}: found {', '.join(suffix or 'no suffix' for suffix in suffixes)}; "
            f"allowed: files of one format among {', '.join(FORMATS)}"
        )
    return _read(section, reader, data_files={_ONLY_SPLIT: [str(file) for file in files]})


def _from_folder(path: Path, section: DatasetSection) -> Rows:
    """Load what `save_to_disk` wrote, or read a folder of data files."""
    saved = (path / "state.json").exists() or (path / "dataset_dict.json").exists()
    if not saved:
        return _read(section, str(path), section.config)
    _refuse(section, "config", kind="a saved dataset")
    try:
        found = load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise _unreadable(section, error) from error
    if isinstance(found, DatasetDict):
        return _as_requested(section, select_split(cast("dict[str, Dataset]", dict(found)), section.split))
    return _as_requested(section, select_split(_named_splits(found), section.split))


def _from_function(function: Any, section: DatasetSection) -> Rows:
    """Call a function of the user's and check what it returns."""
    if not callable(function):
        raise DataError(
            f"dataset.name: {section.name} is {_type_name(function)}; allowed: a function that returns a datasets.Dataset"
        )
    try:
        found = function(**section.arguments)
    except GrpoError:  # one of ours, which says what to do
        raise
    except Exception as error:  # user code can raise anything
        raise DataError(
            f"dataset.name: {section.name} raised {type(error).__name__}: {_one_line(error)}",
            hint="it is called with dataset.arguments as its keyword arguments",
        ) from error
    if isinstance(found, Dataset):
        return _as_requested(section, select_split(_named_splits(found), section.split))
    if isinstance(found, IterableDataset):
        if section.split not in {_ONLY_SPLIT, str(found.split)}:
            raise DataError(
                f"dataset.split: found {section.split}, but {section.name} returns one streaming dataset",
                hint="leave dataset.split out and choose the split in dataset.arguments",
            )
        return found
    several = isinstance(found, Mapping)
    raise DataError(
        f"dataset.name: {section.name} returned {_type_name(found)}; allowed: a datasets.Dataset or datasets.IterableDataset",
        hint="return one split of it" if several else "datasets.Dataset.from_list makes one of a list of rows",
    )


def select_split(splits: Mapping[str, Dataset], split: str) -> Dataset:
    """Select a split or slice of datasets in memory, written as on the hub: `train`, `test[:100]`, `train[:10%]+test`.

    Raises:
        DataError: If there is no such split, or the text is no split.
    """
    try:
        wanted = ReadInstruction.from_spec(split).to_absolute({name: len(rows) for name, rows in splits.items()})
    except (ValueError, AssertionError) as error:
        raise DataError(f"dataset.split: {_one_line(error)}", hint=did_you_mean(split, splits)) from error
    parts = [splits[part.splitname].select(range(part.from_, part.to)) for part in wanted]
    return parts[0] if len(parts) == 1 else cast("Dataset", concatenate_datasets(parts))


def _named_splits(rows: Dataset) -> dict[str, Dataset]:
    """Give a dataset without siblings the name `train`, besides its own."""
    return {_ONLY_SPLIT: rows} | ({} if rows.split is None else {str(rows.split): rows})


def _as_requested(section: DatasetSection, rows: Dataset) -> Rows:
    return rows.to_iterable_dataset() if section.streaming else rows


def _read(section: DatasetSection, *args: Any, **kwargs: Any) -> Rows:
    """Call `load_dataset`, whose readers and downloads raise a great many kinds of errors."""
    try:
        return cast("Rows", load_dataset(*args, split=section.split, streaming=section.streaming, **kwargs))
    except StopIteration as error:  # how its readers say that a file is empty
        raise DataError(f"dataset.name: {section.name} has no rows") from error
    except Exception as error:
        raise _unreadable(section, error) from error


def _unreadable(section: DatasetSection, error: Exception) -> DataError:
    """Pass on what `datasets` said, with the cause that it hides, and with what to do about it."""
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    hint = None
    if isinstance(error, ConnectionError):
        hint = "the name is no local file and no importable function; the hub cannot be reached: check the network"
    elif type(error).__name__ in {"DatasetNotFoundError", "RepositoryNotFoundError"}:
        hint = "check the spelling; a private or gated dataset needs `hf auth login`"
    elif "Unknown split" in str(error) or "Bad split" in str(error):
        hint = "choose one of these in dataset.split"
    elif "BuilderConfig" in str(error) or "Config name is missing" in str(error):
        hint = "choose one of these in dataset.config"
    return DataError(f"dataset.name: {section.name}: {_one_line(cause)}", hint=hint)


def _no_such_file(name: str, folder: Path) -> DataError:
    """Say that a path does not exist, with the nearest name beside it."""
    beside = (folder / Path(name).expanduser()).parent
    names = [entry.name for entry in beside.iterdir()] if beside.is_dir() else []
    return DataError(
        f"dataset.name: {name} does not exist; paths are taken from {folder} and from {Path.cwd()}",
        hint=did_you_mean(Path(name).name, names),
    )


def _refuse(section: DatasetSection, *keys: str, kind: str) -> None:
    """Refuse keys that would be ignored."""
    for key in keys:
        if getattr(section, key):
            raise DataError(f"dataset.{key}: {section.name} is {kind}, which has none", hint=f"leave dataset.{key} out")


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 400 else f"{text[:400]} ..."


def _type_name(value: object) -> str:
    return f"a {type(value).__module__}.{type(value).__name__}".replace("builtins.", "")
