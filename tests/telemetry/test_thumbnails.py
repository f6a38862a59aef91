"""Images in completion files and sample tables, as a person finds them there."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import load_dataset
from PIL import Image
from rich.console import Console

from grpo_cli.engine.evaluation_store import EvaluationStore
from grpo_cli.telemetry.completions import CompletionFiles, completion_table
from grpo_cli.telemetry.records import Rollouts
from grpo_cli.telemetry.samples import pick_samples, samples_table
from grpo_cli.telemetry.thumbnails import SIDE, thumbnail
from grpo_cli.types import ScoredGroup

Maker = Callable[..., ScoredGroup]


def picture(height: int, width: int, mode: str = "RGB", kind: str = "PNG", **saved: Any) -> bytes:
    """A picture whose left half is white and whose right half is black."""
    pixels = np.zeros((height, width), dtype=np.uint8)
    pixels[:, : width // 2] = 255
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, kind, **saved)
    return buffer.getvalue()


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "1", "CMYK"])
def test_a_large_image_keeps_its_proportions_and_what_is_on_it(mode: str) -> None:
    kind = "JPEG" if mode == "CMYK" else "PNG"
    small = Image.open(io.BytesIO(thumbnail(picture(300, 1200, mode, kind))))
    assert small.size == (SIDE, SIDE // 4)
    assert (small.getpixel((5, 5)), small.getpixel((SIDE - 5, 5))) == ((255, 255, 255), (0, 0, 0))


def test_a_small_image_keeps_its_pixels() -> None:
    content = picture(8, 12)
    small = Image.open(io.BytesIO(thumbnail(content)))
    np.testing.assert_array_equal(np.asarray(small), np.asarray(Image.open(io.BytesIO(content))))


def test_an_image_that_a_camera_turned_is_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter, clockwise
    small = Image.open(io.BytesIO(thumbnail(picture(100, 400, kind="JPEG", exif=exif))))
    assert small.size == (SIDE // 4, SIDE)
    assert small.getpixel((5, 5)) > (200, 200, 200) > small.getpixel((5, SIDE - 5))  # type: ignore[operator]


def test_datasets_shows_the_images_of_a_completion_file(
    tmp_path: Path, make_scored: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    groups = [
        make_scored(["a", "b"], [[1.0], [0.5]], images=[picture(8, 12), picture(200, 100)]),
        make_scored(["c"], [[0.0]], uid="0:1", images=[]),
    ]
    rollouts = Rollouts(scored=groups, advantages=[torch.zeros(2), torch.zeros(1)])
    CompletionFiles(tmp_path, ["length"]).write_training(3, rollouts)
    path = tmp_path / "completions" / "train-000003.parquet"
    rows = load_dataset("parquet", data_files=str(path), split="train")
    assert [[image.size for image in row["images"]] for row in rows] == [[(12, 8), (48, 96)]] * 2 + [[]]
    assert rows["completion"][:] == ["a", "b", "c"]


def test_the_files_of_a_run_with_images_have_the_same_columns(make_scored: Maker) -> None:
    tables = [
        completion_table([make_scored(["a"], [[1.0]], images=images)], ["r"], step=1)
        for images in ([picture(4, 4)], [])
    ]
    assert tables[0].schema.equals(tables[1].schema, check_metadata=True)


def test_a_file_of_a_text_run_has_no_column_for_images(make_scored: Maker) -> None:
    assert "images" not in completion_table([make_scored(["a"], [[1.0]])], ["r"], step=1).column_names


def test_a_column_that_a_reward_function_logs_as_images_does_not_take_their_place(make_scored: Maker) -> None:
    group = make_scored(["a"], [[1.0]], images=[picture(4, 4)], extras={"r/images": (3,)})
    table = completion_table([group], ["r"], step=1)
    assert table["extra/images"].to_pylist() == [3]
    assert table["images"].to_pylist()[0][0]["bytes"] == thumbnail(picture(4, 4))


def test_the_completions_of_an_evaluation_keep_their_images(tmp_path: Path, make_scored: Maker) -> None:
    table = completion_table([make_scored(["a"], [[1.0]], images=[picture(4, 4)])], ["r"], step=1)
    store = EvaluationStore(folder=tmp_path)
    store.write_completions(table.drop_columns(["step", "policy_version"]), {}, scored_with={})
    rows = load_dataset("parquet", data_files=str(store.completions_path), split="train", cache_dir=str(tmp_path))
    assert rows[0]["images"][0].size == (4, 4)


@pytest.mark.parametrize(("count", "said"), [(0, ""), (1, "[1 image]"), (3, "[3 images]")])
def test_a_sample_says_how_many_images_its_prompt_has(
    count: int, said: str, make_scored: Maker, plain_console: Console
) -> None:
    group = make_scored(["a"], [[1.0]], images=[picture(4, 4)] * count)
    samples = pick_samples(Rollouts(scored=[group], advantages=[torch.zeros(1)]), 1)
    plain_console.print(samples_table(samples, ["r"], step=1))
    text = plain_console.file.getvalue()  # type: ignore[attr-defined]
    assert ("image" in text) == bool(said)
    assert said in text
