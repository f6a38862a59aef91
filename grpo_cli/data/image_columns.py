"""Columns with images: whether a dataset has some, and images of `datasets` left as the files that they are."""

import copy
from collections.abc import Mapping
from itertools import islice, takewhile
from typing import Any, TypeVar

from datasets import Dataset, Image, IterableDataset, LargeList, List

from grpo_cli.data.columns import PROMPT, column_names
from grpo_cli.recipe.overlooked_images import ROWS_SEEN, columns_with_images
from grpo_cli.types import IMAGE, IMAGES

_ROWS_SEEN = 64
"""First rows whose messages are looked at."""

_RowsT = TypeVar("_RowsT", Dataset, IterableDataset)


def has_images(rows: Dataset | IterableDataset) -> bool:
    """Tell whether a dataset has images: a column of them, or places for them in the messages of its first rows."""
    names = column_names(rows)
    if IMAGE in names or IMAGES in names:
        return True
    if PROMPT not in names:
        return False
    seen = (row[PROMPT] for row in islice(rows.select_columns([PROMPT]), _ROWS_SEEN))
    messages = takewhile(lambda prompt: not isinstance(prompt, str), seen)  # a column of strings has no messages
    return any(_has_place(prompt) for prompt in messages)


def overlooked_images(rows: Dataset | IterableDataset) -> dict[str, bool]:
    """Find columns with images where no prompt has any: their names, and whether each row has a list of them."""
    if has_images(rows):
        return {}
    declared = {name: feature for name, feature in (rows.features or {}).items() if _undecoded(feature) != feature}
    others = [name for name in column_names(rows) if name not in declared]
    seen = columns_with_images(islice(rows.select_columns(others), ROWS_SEEN))
    return {name: isinstance(feature, List | LargeList) for name, feature in declared.items()} | seen


def undecoded(rows: _RowsT) -> _RowsT:
    """Have images of prompts given as `{bytes, path}`, as they are in the dataset: not every row that is read is looked at."""
    if rows.features is None:
        return rows
    changed = {
        name: new
        for name, feature in rows.features.items()
        if name in {IMAGE, IMAGES, PROMPT} and (new := _undecoded(feature)) != feature
    }
    if not changed:
        return rows
    rows = copy.deepcopy(rows)  # the table is not copied
    # Not by a cast, which writes all rows anew where an image is within a list.
    rows.info.features.update(changed)
    return rows


def _undecoded(feature: Any) -> Any:
    if isinstance(feature, Image):
        return Image(mode=feature.mode, decode=False)
    if isinstance(feature, List):
        return List(_undecoded(feature.feature), length=feature.length)
    if isinstance(feature, LargeList):
        return LargeList(_undecoded(feature.feature))
    if isinstance(feature, Mapping):
        return {name: _undecoded(part) for name, part in feature.items()}
    return feature


def _has_place(prompt: Any) -> bool:
    """Tell whether a message has a part that is an image."""
    messages = prompt if isinstance(prompt, list | tuple) else ()
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, list | tuple) for part in content]
    return any(isinstance(part, Mapping) and part.get("type") in {"image", "image_url"} for part in parts)
