"""Small pictures of a prompt's images, for completion files."""

import io
import json
from collections.abc import Sequence

import pyarrow as pa
from PIL import ImageOps

from grpo_cli.types import IMAGES, Prompt
from grpo_cli.vision.pictures import as_rgb, opened

SIDE = 96
"""Pixels of the longer side, at most."""

_KIND = pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()}))
_FEATURES = {IMAGES: {"_type": "List", "feature": {"_type": "Image"}}}


def thumbnail(image: bytes) -> bytes:
    """Make an encoded image a PNG of at most 96 x 96 pixels, with its proportions; a smaller one keeps its size."""
    source = opened(image)
    source.draft(None, (2 * SIDE, 2 * SIDE))  # a JPEG is read no larger than it takes; others know nothing of it
    small = as_rgb(ImageOps.exif_transpose(source))
    small.thumbnail((SIDE, SIDE))
    buffer = io.BytesIO()
    small.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def thumbnail_column(prompts: Sequence[Prompt]) -> pa.Array:
    """Give the thumbnails of each row's prompt, as `datasets` holds images."""
    made = {image: thumbnail(image) for image in dict.fromkeys(image for prompt in prompts for image in prompt.images)}
    return pa.array([[{"bytes": made[image], "path": None} for image in prompt.images] for prompt in prompts], _KIND)


def marked(table: pa.Table) -> pa.Table:
    """Note in a table that its thumbnails are images, so that `datasets` and the viewer of the hub show them."""
    return table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": _FEATURES}})})
