"""Whatever form a dataset has an image in, its pixels arrive, and what is none is told with its place."""

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Array3D, Dataset, Features, Image, List, Value, load_dataset
from PIL import Image as Pillow

from grpo_cli.data.image_columns import has_images, undecoded
from grpo_cli.data.images import ImagePlaces, column_images, encoded
from grpo_cli.errors import DataError

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
GREY = PIXELS[:, :, 0]


def png(pixels: Any = PIXELS) -> bytes:
    buffer = io.BytesIO()
    Pillow.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def pixels_of(content: bytes) -> Any:
    return np.asarray(Pillow.open(io.BytesIO(content)))


def encode(value: Any, *folders: Path) -> bytes:
    return encoded(value, places=ImagePlaces(folders=folders), where="dataset: row 3: image 1")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """An image file, `pictures/one.png`."""
    path = tmp_path / "pictures" / "one.png"
    path.parent.mkdir()
    path.write_bytes(png())
    return path


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(png(), id="bytes"),
        pytest.param({"bytes": png(), "path": "somewhere.png"}, id="struct"),
        pytest.param(f"data:image/png;base64,{base64.b64encode(png()).decode()}", id="data-address"),
        pytest.param({"url": f"data:image/png;base64,{base64.b64encode(png()).decode()}"}, id="openai"),
    ],
)
def test_what_is_encoded_stays_byte_for_byte(value: Any) -> None:
    assert encode(value) == png()


@pytest.mark.parametrize("form", [str, Path, lambda path: {"bytes": None, "path": str(path)}])
def test_a_path_is_read_from_the_first_folder_that_has_it(
    file: Path, form: Callable[[Any], Any], tmp_path: Path
) -> None:
    assert encode(form(file), tmp_path) == png()
    assert encode(form("pictures/one.png"), tmp_path / "elsewhere", tmp_path) == png()
    assert encode(file.as_uri()) == png()


@pytest.mark.parametrize(
    ("value", "pixels"),
    [
        pytest.param(PIXELS, PIXELS, id="array"),
        pytest.param(PIXELS.tolist(), PIXELS, id="lists"),
        pytest.param(PIXELS.astype(np.int64), PIXELS, id="int64"),
        pytest.param(PIXELS.astype(np.float32) / 255, PIXELS, id="fractions"),
        pytest.param(GREY, GREY, id="grey"),
        pytest.param(GREY[:, :, None], GREY, id="grey-with-an-axis"),
        pytest.param(np.dstack([PIXELS, GREY]), np.dstack([PIXELS, GREY]), id="transparent"),
        pytest.param(Pillow.fromarray(PIXELS), PIXELS, id="pillow"),
        pytest.param(Pillow.fromarray(PIXELS).convert("CMYK"), PIXELS, id="pillow-cmyk"),
    ],
)
def test_pixels_become_a_png_without_loss(value: Any, pixels: Any) -> None:
    content = encode(value)
    assert content.startswith(b"\x89PNG")
    np.testing.assert_array_equal(pixels_of(content), pixels)
    assert encode(value) == content


def test_an_image_that_a_camera_turned_is_written_upright() -> None:
    image = Pillow.fromarray(PIXELS)
    image.getexif()[0x0112] = 6  # to be turned by a quarter, clockwise
    np.testing.assert_array_equal(pixels_of(encode(image)), np.rot90(PIXELS, -1))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (7, "image 1 is int; allowed: a PIL image, bytes"),
        ({"pixels": 1}, "image 1 is dict with pixels; allowed"),
        (b"no image", "image 1 cannot be read: its format is not known (8 bytes)"),
        ("absent.png", "absent.png does not exist; paths are taken from"),
        ("memory://absent.png", "image 1 cannot be read from memory://absent.png"),
        (np.zeros((3, 5, 7)), "an array of shape [3, 5, 7]; allowed: height x width"),
        (np.zeros((0, 5)), "an array of shape [0, 5]"),
        (np.full((2, 2), 16.0), "an array with values from 16 to 16"),
        (np.full((2, 2), np.nan), "an array with values from nan to nan"),
        (np.full((2, 2), -1), "an array with values from -1 to -1"),
        (np.full((2, 2), 256), "an array with values from 256 to 256"),
        ([[1, 2], [3]], "is a list that is no array"),
        ([png(), png()], "is an array of |S"),
    ],
)
def test_what_is_no_image_is_told_with_its_place(value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as raised:
        encode(value, tmp_path)
    assert raised.value.message.startswith("dataset: row 3: image 1")
    assert message in raised.value.message


@pytest.mark.parametrize(
    ("row", "count"),
    [
        ({}, 0),
        ({"image": None, "images": None}, 0),
        ({"image": {"bytes": None, "path": None}}, 0),
        ({"image": ""}, 0),
        ({"images": []}, 0),
        ({"images": [None, png()]}, 1),
        ({"image": GREY}, 1),
        ({"image": png(), "images": []}, 1),
        ({"images": (png(), GREY, "a.png")}, 3),
    ],
)
def test_what_is_empty_is_no_image(row: dict[str, Any], count: int) -> None:
    assert len(column_images(row, where="dataset: row 3")) == count


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"image": png(), "images": [png()]}, "row 3: both `image` and `images` have images"),
        ({"images": png()}, "row 3: `images` is bytes; allowed: a list of images"),
    ],
)
def test_columns_that_cannot_be_understood_are_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        column_images(row, where="dataset: row 3")


def test_images_of_a_dataset_are_given_as_the_files_that_they_are(tmp_path: Path) -> None:
    parts = [{"type": "image", "image": Pillow.fromarray(PIXELS)}]
    rows = [
        {"image": Pillow.fromarray(PIXELS), "images": [Pillow.fromarray(GREY)], "photo": Pillow.fromarray(PIXELS)}
        | {"prompt": [{"role": "user", "content": parts}]}
    ]
    part = {"type": Value("string"), "image": Image()}
    features = Features(
        image=Image(),
        images=List(Image()),
        photo=Image(),
        prompt=List({"role": Value("string"), "content": List(part)}),
    )
    Dataset.from_list(rows, features=features).to_parquet(tmp_path / "rows.parquet")
    for streaming in (False, True):
        loaded = load_dataset("parquet", data_files=str(tmp_path / "rows.parquet"), split="train", streaming=streaming)
        row = next(iter(undecoded(loaded)))
        inside = row["prompt"][0]["content"][0]["image"]
        for content, pixels in ((row["image"], PIXELS), (row["images"][0], GREY), (inside, PIXELS)):
            np.testing.assert_array_equal(pixels_of(encode(content)), pixels)
            assert set(content) == {"bytes", "path"}
        assert isinstance(row["photo"], Pillow.Image)  # a column of another name is the rewards' alone
        assert isinstance(next(iter(loaded))["image"], Pillow.Image)


def test_an_array_column_holds_images() -> None:
    rows = Dataset.from_dict({"image": [PIXELS]}, features=Features(image=Array3D(PIXELS.shape, "uint8")))
    np.testing.assert_array_equal(pixels_of(encode(undecoded(rows)[0]["image"])), PIXELS)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "Why?", "picture": "a.png"}, False),
        ({"prompt": "Why?", "image": None}, True),
        ({"prompt": [{"role": "user", "content": "Why?"}]}, False),
        ({"prompt": [{"role": "user", "content": [{"type": "text", "text": "Why?"}]}]}, False),
        ({"prompt": [{"role": "user", "content": [{"type": "image", "text": None}]}]}, True),
        ({"question": "Why?"}, False),
    ],
)
def test_a_dataset_has_images_in_columns_or_messages(row: dict[str, Any], expected: bool) -> None:
    rows = Dataset.from_list([row])
    assert has_images(rows) is expected
    assert has_images(rows.to_iterable_dataset()) is expected
