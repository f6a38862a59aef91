"""Columns with images that no prompt shows: a recipe has to map them, and nothing else would say that it does not."""

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_cli.recipe.combinations import dataset_sections
from grpo_cli.recipe.imports import PACKAGE_PREFIX, is_dotted_path, package_folder
from grpo_cli.recipe.rows import first_rows, matching_files
from grpo_cli.recipe.schema import DatasetSection, Recipe

ROWS_SEEN = 8
"""First rows whose values are looked at."""

SHOWN = ("image", "images")
"""Columns whose images are in prompts."""

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
_LONGEST_PATH = 4096


def overlooked_in_files(recipe: Recipe, folder: Path) -> list[str]:
    """Give a line for each dataset in local files that has images and shows none, if the model surely sees.

    Args:
        recipe: One that is allowed.
        folder: Its folder.
    """
    columns = {key: (dataset, _in_files(dataset, folder)) for key, dataset in dataset_sections(recipe)}
    if not any(found for _, found in columns.values()) or not _surely_sees(recipe.model.name_or_path, folder):
        return []
    lines = (overlooked_line(key, dataset, found) for key, (dataset, found) in columns.items())
    return [line for line in lines if line is not None]


def overlooked_line(key: str, dataset: DatasetSection, columns: Mapping[str, bool]) -> str | None:
    """Say that no prompt shows a dataset's images; None: there are none, or the recipe gives their columns names of their own.

    Args:
        key: Of the dataset, such as `eval.dataset`.
        dataset: What the recipe says of it.
        columns: From `columns_with_images`.
    """
    left = {name: is_list for name, is_list in columns.items() if name not in dataset.columns}
    if not left:
        return None
    first, is_list = next(iter(left.items()))
    names = ", ".join(f"`{name}`" for name in left)
    return (
        f"images of column {names}: no prompt shows them; `{key}.columns: {{{SHOWN[is_list]}: {first}}}` would, and "
        f"`{{{first}: {first}}}` says that they are for rewards alone"
    )


def columns_with_images(rows: Iterable[Mapping[str, Any]]) -> dict[str, bool]:
    """Find columns with an image, or a list of images, among the first few rows: their names, and whether it is a list."""
    found: dict[str, bool] = {}
    for row in rows:
        found |= {name: isinstance(value, list | tuple) for name, value in row.items() if _has_image(value)}
    return found


def _in_files(dataset: DatasetSection, folder: Path) -> dict[str, bool]:
    """Look at the rows of local files, with columns as the recipe calls them; nothing is found where prompts have images."""
    files = [] if is_dotted_path(dataset.name, folder) else matching_files(dataset.name, folder)
    try:
        rows = first_rows(files, ROWS_SEEN)
    except (OSError, ValueError):  # which a run will tell of
        return {}
    names = {old: new for new, old in dataset.columns.items()}
    renamed = [{names.get(name, name): value for name, value in row.items()} for row in rows]
    shows = any(not {*SHOWN}.isdisjoint(row) or _has_parts(row.get("prompt")) for row in renamed)
    return {} if shows else columns_with_images(renamed)


def _has_parts(prompt: Any) -> bool:
    """Tell whether a message may have images in it."""
    messages = prompt if isinstance(prompt, list) else ()
    return any(isinstance(message, Mapping) and isinstance(message.get("content"), list) for message in messages)


def _has_image(value: Any) -> bool:
    """Tell whether a value is an image, or a list of them; a path is one by its suffix."""
    from PIL import Image, UnidentifiedImageError  # noqa: PLC0415  most recipes have a text for each row and nothing else

    match value:
        case Image.Image():
            return True
        case list() | tuple() if value:
            return all(map(_has_image, value))
        case {"bytes": bytes() as content} | (bytes() as content):
            try:
                Image.open(io.BytesIO(content), formats=_FORMATS).close()
            except (UnidentifiedImageError, OSError, ValueError, SyntaxError):
                return False
            return True
        case {"path": str() as path} | (str() as path):
            return len(path) < _LONGEST_PATH and "\n" not in path and path.lower().endswith(_SUFFIXES)
    return False


def _surely_sees(name: str, folder: Path) -> bool:
    """Tell whether a model in a local folder has a part for images; of one that is not here nobody asks."""
    if name.startswith(PACKAGE_PREFIX):
        package, _, file = name.removeprefix(PACKAGE_PREFIX).partition("/")
        place = package_folder(package)
        places: Sequence[Path] = [] if place is None else [place / file]
    else:
        places = matching_files(name, folder)
    try:
        config = json.loads((places[0] / "config.json").read_text(encoding="utf-8")) if places else {}
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "vision_config" in config
