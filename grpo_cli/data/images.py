"""Images of dataset rows, in any of the forms that datasets have them in, as encoded bytes."""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from grpo_cli.errors import DataError
from grpo_cli.types import IMAGE, IMAGES
from grpo_cli.vision.pictures import as_rgb, opened

_MODES_OF_PNG = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16"})
_ALLOWED = "a PIL image, bytes, {bytes, path}, a path, or an array"
_ALLOWED_ARRAY = "height x width, or height x width x 1, 3 or 4, of integers from 0 to 255 or of fractions from 0 to 1"
_SHOWN_CHARACTERS = 80
_ADDRESSES_OF_OTHERS = ("https://", "http://", "hf://", "s3://", "gs://", "data:")
_ARCHIVES = ("zip://", "tar://", "gzip://", "bz2://", "xz://", "zstd://")
"""What rows that somebody else wrote may name: nothing that is read from this machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImagePlaces:
    """Where the paths of a dataset's images lead.

    Attributes:
        folders: Where relative ones are looked for, in this order.
        own_folders: Where absolute ones of a dataset from the hub may lead, which somebody else wrote: to its own files. None: the dataset
            is the user's own, and they may lead anywhere.
    """

    folders: tuple[Path, ...] = ()
    own_folders: tuple[Path, ...] | None = None

    def allow(self, path: str) -> bool:
        """Tell whether a path or an address may be read."""
        if self.own_folders is None:
            return True
        if _is_address(path):
            *archives, source = path.split("::")  # `zip://one.png::https://...` is a file in an archive
            return source.startswith(_ADDRESSES_OF_OTHERS) and all(one.startswith(_ARCHIVES) for one in archives)
        parts = Path(path)
        if ".." in parts.parts or path.startswith("~"):
            return False
        return not parts.is_absolute() or any(parts.is_relative_to(folder) for folder in self.own_folders)


def column_images(row: Mapping[str, Any], *, where: str) -> list[Any]:
    """Give the images of a row's own columns as they are, not opened; what is None or empty is no image.

    Args:
        row: The columns, after `columns:` mapping.
        where: Names the row in errors.

    Raises:
        DataError: If both columns have something, or `images` holds no list.
    """
    one, several = row.get(IMAGE), row.get(IMAGES)
    if several is not None and not isinstance(several, list | tuple):
        raise DataError(
            f"{where}: `{IMAGES}` is {type(several).__name__}; allowed: a list of images",
            hint=f"a column with one image for each row is called `{IMAGE}`; dataset.columns can rename it",
        )
    found = [value for value in several or () if not is_nothing(value)]
    if is_nothing(one):
        return found
    if found:
        raise DataError(
            f"{where}: both `{IMAGE}` and `{IMAGES}` have images; allowed: one of the two",
            hint=f"give one of them another name in dataset.columns, such as `{{other_{IMAGE}: {IMAGE}}}`",
        )
    return [one]


def encoded(value: Any, *, places: ImagePlaces, where: str) -> bytes:
    """Give an image as the content of an image file.

    What is encoded already stays as it is. Anything else becomes a PNG, the same for the same pixels: a PIL image, or an array of
    height x width (grey), or height x width x 1, 3 or 4 (grey, RGB, RGBA). Its numbers are integers from 0 to 255; fractions go from
    0 (black) to 1.

    Args:
        value: One of `column_images`, or what stands in a message.
        places: Where paths lead.
        where: Names the row, the image and its column in errors.

    Raises:
        DataError: If it is none of these, there is no such file, or it is no image.
    """
    if isinstance(value, Image.Image):
        return _png(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return _checked(bytes(value), value, where)
    if isinstance(value, Mapping):
        if isinstance(value.get("bytes"), bytes):
            return _checked(value["bytes"], value, where)
        value = value.get("path") or value.get("url") or value
    if isinstance(value, str | Path):
        return _checked(_read(str(value), places, where), value, where)
    if isinstance(value, list | tuple) or hasattr(value, "__array__"):
        return _png(Image.fromarray(_pixels(value, where)))
    keys = f" with {', '.join(map(str, value)) or 'nothing'}" if isinstance(value, Mapping) else ""
    raise DataError(f"{where} is {type(value).__name__}{keys}; allowed: {_ALLOWED}")


def unreadable(value: Any, content: bytes, reason: str, *, where: str) -> DataError:
    """Say that an image is damaged, or is none.

    Args:
        value: As the dataset has it; its path or address is named, if it has one.
        content: What was read of it.
        reason: What its decoder says.
        where: Names the row, the image and its column.
    """
    named = value.get("path") or value.get("url") if isinstance(value, Mapping) else value
    source = f" from {_shortened(str(named))}" if isinstance(named, str | Path) else ""
    return DataError(f"{where} cannot be read{source}: {reason} ({len(content):,} bytes)")


def is_nothing(value: Any) -> bool:
    """Tell whether a value stands for no image; a column of structs has every key in every row."""
    if isinstance(value, Mapping):
        return all(is_nothing(one) for one in value.values())
    return value is None or (isinstance(value, str | bytes | list | tuple) and not value)


def _png(image: Image.Image) -> bytes:
    """Write a PNG without loss, turned as its EXIF data say, which would not be kept."""
    upright = ImageOps.exif_transpose(image)
    buffer = io.BytesIO()
    # Fast rather than small: it is written for every draw.
    (upright if upright.mode in _MODES_OF_PNG else as_rgb(upright)).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def _checked(content: bytes, value: Any, where: str) -> bytes:
    """Look at the head of an image file; its pixels are read when they are needed."""
    try:
        opened(content).close()
    except Exception as error:  # what readers of broken heads meet is of many kinds
        reason = "its format is not known" if isinstance(error, UnidentifiedImageError) else str(error)
        raise unreadable(value, content, reason, where=where) from error
    return content


def _read(path: str, places: ImagePlaces, where: str) -> bytes:
    """Read a file by its path, or by an address that fsspec knows: `https:`, `hf:`, `data:` and more."""
    shown = _shortened(path)
    if not places.allow(path):
        raise DataError(
            f"{where}: {shown} is on this machine; a dataset from the hub may name addresses and relative paths without `..` only",
            hint="to trust it, copy the dataset and name the copy in dataset.name",
        )
    if _is_address(path):
        try:
            with fsspec.open(path, "rb") as file:
                return bytes(file.read())
        except Exception as error:  # file systems raise what the libraries below them do
            reason = " ".join(str(error).split()) or type(error).__name__
            raise DataError(f"{where} cannot be read from {shown}: {reason[:400]}") from error
    try:
        found = next(
            (place for folder in places.folders if (place := folder / Path(path).expanduser()).is_file()), None
        )
    except (
        OSError,
        ValueError,
        RuntimeError,
    ):  # too long, with a zero byte, or of a user that is not known: it is no path
        found = None
    if found is None:
        folders = ", ".join(str(folder) for folder in places.folders)
        raise DataError(
            f"{where}: {shown} does not exist; paths are taken from {folders}",
            hint=None if shown == path else "write the content of a file in base64 as `data:;base64,...`",
        )
    try:
        return found.read_bytes()
    except OSError as error:
        raise DataError(f"{where}: {found} cannot be read: {error.strerror}") from error


def _shortened(path: str) -> str:
    return path if len(path) <= _SHOWN_CHARACTERS else f"{path[:_SHOWN_CHARACTERS]}..."


def _is_address(path: str) -> bool:
    return "://" in path or path.startswith("data:")


def _pixels(value: Any, where: str) -> Any:
    """Turn an array, or lists in lists, into uint8 of a shape that PIL takes."""
    try:
        array = np.asarray(value)
    except ValueError as error:  # rows of different lengths
        raise DataError(f"{where} is a list that is no array; allowed: {_ALLOWED_ARRAY}") from error
    if array.dtype.kind not in "uif":
        raise DataError(
            f"{where} is an array of {array.dtype}; allowed: {_ALLOWED_ARRAY}",
            hint=f"a list of several images is called `{IMAGES}`; dataset.columns can rename a column",
        )
    if 0 in array.shape or array.ndim not in {2, 3} or (array.ndim == 3 and array.shape[2] not in {1, 3, 4}):
        raise DataError(f"{where} is an array of shape {list(array.shape)}; allowed: {_ALLOWED_ARRAY}")
    highest = 1 if array.dtype.kind == "f" else 255
    if not (array.min() >= 0 and array.max() <= highest):
        raise DataError(
            f"{where} is an array with values from {array.min():g} to {array.max():g}; allowed: {_ALLOWED_ARRAY}"
        )
    levels = np.rint(array * 255) if highest == 1 else array
    pixels = np.ascontiguousarray(levels.astype(np.uint8))
    return pixels[:, :, 0] if pixels.shape[2:] == (1,) else pixels
