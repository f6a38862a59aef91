"""What models and people are shown of an encoded image: the colours that a viewer shows."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image, UnidentifiedImageError

from grpo_cli.telemetry.thumbnails import thumbnail
from grpo_cli.vision.pictures import FORMATS, as_rgb, decoded, opened, opened_upright

WHITE, RED, PINK = (255, 255, 255), (255, 0, 0), (255, 127, 127)


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def with_palette() -> bytes:
    """Red beside a colour that is declared transparent, black in the palette."""
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 0])
    image.putpixel((1, 0), 1)
    return saved(image, transparency=1)


def with_alpha(*alphas: int) -> bytes:
    return saved(Image.fromarray(np.array([[(255, 0, 0, alpha) for alpha in alphas]], dtype=np.uint8)))


@pytest.mark.parametrize(
    ("content", "colours"),
    [
        pytest.param(with_alpha(255, 0, 128), [RED, WHITE, PINK], id="alpha"),
        pytest.param(with_palette(), [RED, WHITE], id="palette"),
        pytest.param(
            saved(Image.fromarray(np.array([[[0, 255], [0, 0]]], dtype=np.uint8))), [(0, 0, 0), WHITE], id="grey"
        ),
        pytest.param(saved(Image.new("RGB", (2, 1), RED), transparency=RED), [WHITE, WHITE], id="one-colour"),
    ],
)
def test_what_is_transparent_is_white(content: bytes, colours: list[tuple[int, ...]]) -> None:
    for shown in (decoded(content), Image.open(io.BytesIO(thumbnail(content)))):
        assert [shown.getpixel((place, 0)) for place in range(len(colours))] == colours


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_grey_of_16_bits_keeps_its_levels(kind: str) -> None:
    levels = np.array([[0, 257, 32_896, 65_535]], dtype=np.uint16)
    content = saved(Image.fromarray(levels), kind)
    assert np.asarray(decoded(content))[0, :, 0].tolist() == [0, 1, 128, 255]


def test_whole_numbers_up_to_255_are_levels_as_they_are() -> None:
    levels = np.array([[0, 7, 255]], dtype=np.int32)
    assert np.asarray(as_rgb(Image.fromarray(levels)))[0, :, 1].tolist() == [0, 7, 255]


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_that_is_named_is_read(kind: str) -> None:
    assert opened(saved(Image.new("RGB", (16, 16), RED), kind)).size == (16, 16)


@pytest.mark.parametrize("kind", ["EPS", "PDF"])
def test_what_another_program_would_have_to_run_is_not_opened(kind: str) -> None:
    content = saved(Image.new("RGB", (16, 16), RED), kind)
    if kind == "EPS":
        assert Image.open(io.BytesIO(content)).format == kind
    with pytest.raises(UnidentifiedImageError):
        opened(content)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_what_a_camera_turned_is_upright_for_models_and_rewards(kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter, clockwise
    content = saved(Image.new("RGB", (16, 8)), kind, exif=exif)
    assert decoded(content).size == opened_upright(content).size == (8, 16)
