"""Pictures of handwritten digits that need no download: what `dataset.name: grpo_cli.data.digits.pictures` means.

They are the 1,797 digits of the UCI machine-learning repository (Alpaydin and Kaynak 1998, "Optical Recognition of Handwritten
Digits", CC BY 4.0) that scikit-learn, an optional package, brings along: 8 x 8 pixels in 17 shades.
"""

import hashlib
import importlib.util
import io
from typing import Any

import numpy as np
from datasets import Dataset
from PIL import Image

from grpo_cli.errors import DataError

_HELD_OUT = 5
"""One picture in so many is held out."""

_WHITE = 16
"""The brightest shade."""


def pictures(*, question: str = "Which digit?", scale: int = 4, held_out: bool = False) -> Dataset:
    """Draw the digits, white on black, each once.

    Whether one is held out depends on its own pixels only, so that no picture is both trained and evaluated on.

    Args:
        question: What is asked about each.
        scale: Width and height of a pixel: 4 makes pictures of 32 x 32.
        held_out: Give held-out pictures instead of those to train on.

    Returns:
        The columns `prompt` (one user message), `image` (PNG) and `solution` (the digit).

    Raises:
        DataError: If scikit-learn is not installed, or the scale is none.
    """
    if scale < 1:
        raise DataError(f"dataset.arguments.scale: found {scale}; allowed: at least 1")
    if importlib.util.find_spec("sklearn") is None:
        raise DataError(
            "dataset.name: grpo_cli.data.digits.pictures needs scikit-learn, which is not installed",
            hint="pip install 'grpo-cli[vision]'",
        )
    from sklearn.datasets import load_digits  # noqa: PLC0415  optional package

    found = load_digits()
    message = {"role": "user", "content": question}
    return Dataset.from_list(
        [
            {"prompt": [message], "image": _drawn(shades, scale), "solution": str(digit)}
            for shades, digit in zip(found.images, found.target, strict=True)
            if _is_held_out(shades) == held_out
        ]
    )


def _is_held_out(shades: Any) -> bool:
    """Decide by the pixels; the same on every machine."""
    digest = hashlib.blake2b(shades.astype(np.uint8).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest) % _HELD_OUT == 0


def _drawn(shades: Any, scale: int) -> bytes:
    """Encode a digit's shades, each as a square of pixels."""
    pixels = np.round(shades * (255 / _WHITE)).astype(np.uint8)
    encoded = io.BytesIO()
    Image.fromarray(pixels.repeat(scale, axis=0).repeat(scale, axis=1)).save(encoded, format="PNG")
    return encoded.getvalue()
