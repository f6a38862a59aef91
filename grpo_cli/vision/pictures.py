"""Encoded images as Pillow opens them, and as the colours that models are shown."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from PIL import Image, ImageOps

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM")
"""What is read. Pillow has more, and one of them, PostScript, is a program that it has another program run: a dataset must not bring one."""

_WHITE = 255
_LEVELS_16_TO_8 = 65_535 // _WHITE


class DamagedImageError(ValueError):
    """An encoded image cannot be decoded, or is none.

    Args:
        content: The image.
        reason: What its decoder says.
    """

    def __init__(self, content: bytes, reason: str) -> None:
        super().__init__(f"an image cannot be read: {reason}")
        self.content = content
        self.reason = reason


def opened(content: bytes) -> Image.Image:
    """Open an encoded image, of which the pixels are read when they are looked at.

    Raises:
        Exception: Whatever Pillow meets, `PIL.UnidentifiedImageError` if it is of no format among `FORMATS`.
    """
    return Image.open(io.BytesIO(content), formats=FORMATS)


def opened_upright(content: bytes) -> Image.Image:
    """Do the same, and turn it as a camera's note in it says, for which its pixels are read."""
    image = opened(content)
    # A PNG has notes before its pixels, or none; Pillow would read all of it to look behind them.
    if image.format != "PNG" or image.info:
        ImageOps.exif_transpose(image, in_place=True)
    return image


def as_rgb(image: Image.Image) -> Image.Image:
    """Give an image in RGB: transparency on white, as pages and viewers show it, and 16 bits of grey as 8."""
    if image.mode.startswith("I"):
        levels = np.asarray(image)
        # Of whole numbers of 32 bits only their size tells what white is.
        scale = _LEVELS_16_TO_8 if image.mode != "I" or levels.max() > _WHITE else 1
        image = Image.fromarray((levels // scale).clip(0, _WHITE).astype(np.uint8))
    if not image.has_transparency_data:
        return image.convert("RGB")
    colours: Any = image.convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, colours).convert("RGB")


def pixels_of(content: bytes) -> int:
    """Count an encoded image's pixels, for which only its head is read.

    Raises:
        DamagedImageError: If it is none.
    """
    with _explained(content):
        image = opened(content)
    return image.width * image.height


def decoded(content: bytes) -> Image.Image:
    """Read an encoded image as a model is shown it: upright, in RGB.

    Raises:
        DamagedImageError: If it is none, or is damaged.
    """
    with _explained(content):
        return as_rgb(ImageOps.exif_transpose(opened(content)))


@contextmanager
def _explained(content: bytes) -> Iterator[None]:
    """Make one kind of error of what decoders meet in damaged files, which is of many."""
    try:
        yield
    except Exception as error:
        raise DamagedImageError(content, " ".join(str(error).split()) or type(error).__name__) from error
