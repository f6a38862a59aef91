"""Pictures of digits, against the package that they come from."""

import io
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from grpo_cli.data.digits import pictures
from grpo_cli.errors import DataError

datasets = pytest.importorskip("sklearn.datasets")


def pixels(image: bytes) -> np.ndarray:
    """Read a picture."""
    opened = Image.open(io.BytesIO(image))
    assert opened.mode == "L"
    return np.asarray(opened)


def test_every_digit_is_on_one_side_and_one_in_five_is_held_out() -> None:
    trained, held_out = pictures(), pictures(held_out=True)
    assert len(trained) + len(held_out) == 1797
    assert len(held_out) == pytest.approx(1797 / 5, rel=0.1)
    assert set(trained["image"]).isdisjoint(held_out["image"])
    for side in (trained, held_out):
        counts = Counter(side["solution"])
        assert sorted(counts) == list("0123456789")
        assert min(counts.values()) > 0.6 * max(counts.values())


def test_a_picture_shows_its_digit() -> None:
    """The pixels of each picture, scaled down again, are the shades of a digit with the same label, and no others."""
    found = datasets.load_digits()
    expected = Counter((label, shades.tobytes()) for label, shades in zip(found.target, found.images, strict=True))
    drawn: Counter[tuple[int, bytes]] = Counter()
    for row in [*pictures(scale=3), *pictures(scale=3, held_out=True)]:
        image = pixels(row["image"])
        assert image.shape == (24, 24)
        assert (image == image[::3, ::3].repeat(3, axis=0).repeat(3, axis=1)).all()
        shades = np.round(image[::3, ::3] / 255 * 16).astype(np.float64)
        drawn[int(row["solution"]), shades.tobytes()] += 1
    assert drawn == expected


def test_the_question_is_the_recipes() -> None:
    [message] = pictures(question="What is it?")[0]["prompt"]
    assert message == {"role": "user", "content": "What is it?"}


def test_a_scale_that_is_none_is_refused() -> None:
    with pytest.raises(DataError, match=r"dataset\.arguments\.scale: found 0; allowed: at least 1"):
        pictures(scale=0)
