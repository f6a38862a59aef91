"""What reward functions receive of a prompt's images, in the trainer's process and in one of their own."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scoring.scoring_groups import STATE, group

from grpo_cli.recipe.schema.rewards import RewardFunction, RewardsSection
from grpo_cli.scoring.functions import load_rewards
from grpo_cli.scoring.reward import make_reward
from grpo_cli.scoring.runtime import RewardScorer
from grpo_cli.types import Group

PIXELS = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)

FUNCTIONS = """
def corner(images, **_):
    return [None if not found else float(sum(found[-1].getpixel((3, 3)))) for found in images]

def only(image, **_):
    return [None if found is None else float(sum(found.getpixel((0, 0)))) for found in image]

def unnamed(completions, **others):
    return [float(len({"image", "images"} & others.keys()))] * len(completions)
"""


def picture(add: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(PIXELS + np.uint8(add)).save(buffer, "PNG")
    return buffer.getvalue()


def with_images(one: Group, *images: bytes) -> Group:
    return replace(one, prompt=replace(one.prompt, images=images))


GROUPS = [
    with_images(group(0, "p", ["a", "b"], images=[picture(0), picture(1)], image=None), picture(0), picture(1)),
    group(1, "q", ["c", "d"], images=[], image=None),
    with_images(group(2, "r", ["e", "f"], image=picture(2)), picture(2)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe's folder with functions in it."""
    folder = tmp_path_factory.mktemp("recipe")
    (folder / "image_functions.py").write_text(FUNCTIONS)
    return folder


def scores(function: str, folder: Path, *, isolated: bool) -> list[list[float]]:
    section = RewardsSection(reward_funcs=[RewardFunction(path=f"image_functions.{function}", isolated=isolated)])
    scorer = RewardScorer(load_rewards(section, folder=folder, device="cpu"))
    try:
        return [one.rewards[:, 0].tolist() for one in scorer.score(GROUPS, STATE).groups]
    finally:
        scorer.close()


@pytest.mark.parametrize("isolated", [False, True])
def test_a_function_that_names_them_gets_images(isolated: bool, folder: Path) -> None:
    last_corner, first_corner = float(PIXELS[3, 3].sum()), float(PIXELS[0, 0].sum())
    lists = scores("corner", folder, isolated=isolated)
    assert lists[0] == [last_corner + 3] * 2
    assert np.isnan(lists[1:]).all()
    single = scores("only", folder, isolated=isolated)
    assert single[2] == [first_corner + 6] * 2
    assert np.isnan(single[:2]).all()


@pytest.mark.parametrize(("isolated", "count"), [(False, 2.0), (True, 0.0)])
def test_images_are_not_sent_to_a_process_that_did_not_ask_for_them(isolated: bool, count: float, folder: Path) -> None:
    assert scores("unnamed", folder, isolated=isolated) == [[count] * 2] * 3


def test_pixels_are_read_only_when_they_are_looked_at() -> None:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64), dtype=np.uint8)).save(buffer, "PNG")
    cut = buffer.getvalue()[:1000]  # its head is whole
    seen: list[Any] = []

    def function(images: list[Any], **_: Any) -> list[float]:
        seen.extend(images)
        return [0.0]

    scorer = RewardScorer([make_reward("f", function)])
    scorer.score([with_images(group(0, "p", ["a"], images=[cut]), cut)], STATE)
    scorer.close()
    assert seen[0][0].size == (64, 64)
    with pytest.raises(OSError, match="trunc"):
        seen[0][0].load()


def test_an_image_that_a_camera_turned_is_shown_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter, clockwise
    buffer = io.BytesIO()
    Image.fromarray(PIXELS[:2]).save(buffer, "PNG", exif=exif)
    seen: list[Any] = []

    def function(images: list[Any], **_: Any) -> list[float]:
        seen.extend(images)
        return [0.0]

    scorer = RewardScorer([make_reward("f", function)])
    scorer.score([with_images(group(0, "p", ["a"], images=[buffer.getvalue()]), buffer.getvalue())], STATE)
    scorer.close()
    np.testing.assert_array_equal(np.asarray(seen[0][0]), np.rot90(PIXELS[:2], -1))
