"""Images that cannot be used: before training they are an error that names the row, and after that a row less."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from PIL import Image
from transformers import AutoProcessor, AutoTokenizer

from grpo_cli.data.images import ImagePlaces, encoded
from grpo_cli.data.preflight import preflight
from grpo_cli.data.prompts import PromptBuilder, prompt_id
from grpo_cli.data.sampler import PromptSampler
from grpo_cli.data.sources import image_places
from grpo_cli.data.streaming import StreamingPromptSampler
from grpo_cli.errors import DataError
from grpo_cli.recipe.schema import DatasetSection
from grpo_cli.types import Prompt
from grpo_cli.vision.processor import VisionProcessor


def picture(height: int = 16, width: int = 16) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


GOOD = picture()
BAD: Sequence[tuple[Any, str]] = [
    (GOOD[: len(GOOD) // 2], "Row"),  # cut short
    (b"no image", "Row"),
    ("absent.png", "Row"),
    ("memory://absent.png", "Row"),
    (picture(1, 600), "Row"),  # wider than the processor takes
    (GOOD, "Row <|image_pad|>"),
]


@pytest.fixture
def builder(vision_folder: Callable[[str], Path]) -> PromptBuilder:
    """Of a Qwen2.5-VL."""
    folder = vision_folder("qwen2_5_vl")
    return PromptBuilder(
        AutoTokenizer.from_pretrained(folder),
        DatasetSection(name="rows", conversational=True),
        vision=VisionProcessor(AutoProcessor.from_pretrained(folder)),
    )


def rows_with(bad: Any, text: str, *, at: int, count: int = 40) -> Dataset:
    """Rows of which one has something bad."""
    rows = [{"prompt": f"Row {number}", "image": {"bytes": GOOD, "path": None}} for number in range(count)]
    as_bytes = isinstance(bad, bytes)
    rows[at] = {"prompt": text, "image": {"bytes": bad if as_bytes else None, "path": None if as_bytes else bad}}
    return Dataset.from_list(rows)


@pytest.mark.parametrize(("bad", "text"), BAD)
def test_one_that_nobody_has_prepared_is_passed_over_and_counted(bad: Any, text: str, builder: PromptBuilder) -> None:
    rows = rows_with(bad, text, at=33)
    sampler = PromptSampler(rows, builder, preflight(rows, builder, measured=2), seed=0, shuffle=False)
    drawn = [sampler.take(8, places=[1, 5]) for _ in range(5)]
    assert [[prompt.uid for prompt in prompts] for prompts in drawn] == [
        ["0:1", "0:5"],
        ["0:9", "0:13"],
        ["0:17", "0:21"],
        ["0:25", "0:29"],
        ["0:34", "0:38"],
    ]
    assert list(sampler.rejected.values()) == [1]
    (reason,) = sampler.rejected
    assert reason.startswith("its images cannot be used; the first such row: dataset: row 33: ")
    resumed = PromptSampler(rows, builder, preflight(rows, builder, measured=2), seed=0, shuffle=False)
    resumed.load_state_dict({**sampler.state_dict(), "drawn": 32})
    assert [prompt.uid for prompt in resumed.take(8, places=[1, 5])] == ["0:34", "0:38"]


@pytest.mark.parametrize(("bad", "text"), BAD)
def test_one_that_is_prepared_before_training_is_an_error(bad: Any, text: str, builder: PromptBuilder) -> None:
    with pytest.raises(DataError, match="dataset: row 33: "):
        preflight(rows_with(bad, text, at=33), builder, measured=None)


@pytest.mark.parametrize(("bad", "text"), BAD)
def test_a_stream_passes_over_it(bad: Any, text: str, builder: PromptBuilder) -> None:
    stream = rows_with(bad, text, at=1, count=4).to_iterable_dataset()
    sampler = StreamingPromptSampler(stream, builder, seed=0, shuffle=False, buffer_size=1)
    assert [prompt.uid for prompt in sampler.take(3)] == ["0:0", "0:2", "0:3"]
    assert list(sampler.rejected.values()) == [1]


def test_when_all_images_are_gone_the_run_ends(builder: PromptBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_cli.data.prompts._MOST_UNUSABLE", 8)
    rows = Dataset.from_list([{"prompt": "Row", "image": "memory://gone.png"}] * 40)
    found = preflight(Dataset.from_list([{"prompt": "Row", "image": GOOD}] * 40), builder, measured=1)
    sampler = PromptSampler(rows, builder, found, seed=0, shuffle=False)
    with pytest.raises(
        DataError, match=r"the images of 8 rows one after another cannot be used; the last: dataset: row 7: "
    ) as raised:
        sampler.take(4)
    assert "--resume" in str(raised.value)


@pytest.mark.parametrize("nothing", [{"bytes": None, "path": None}, "", b"", None])
def test_a_column_with_nothing_in_it_is_none_beside_images_in_messages(nothing: Any, builder: PromptBuilder) -> None:
    turn = {"role": "user", "content": [{"type": "image", "image": GOOD}, {"type": "text", "text": "Why?"}]}
    within = builder.build({"prompt": [turn], "image": nothing}, prompt_id(0, 0))
    assert isinstance(within, Prompt)
    assert (within.row["image"], within.row["images"]) == (None, [GOOD])
    without = builder.build({"prompt": "Why?", "image": nothing}, prompt_id(0, 0))
    assert isinstance(without, Prompt)
    assert without.row["image"] is None


def test_the_first_prompt_with_images_is_kept(builder: PromptBuilder) -> None:
    rows = Dataset.from_list(
        [{"prompt": f"Row {number}", "image": GOOD if number == 37 else None} for number in range(40)]
    )
    found = preflight(rows, builder, measured=2)
    assert found.first.uid == "0:0"
    assert found.first_with_images is not None
    assert (found.first_with_images.uid, found.first_with_images.images) == ("0:37", (GOOD,))
    assert found.unmeasured == 0


@pytest.mark.parametrize("value", ["iVBORw0KGgo" * 1000, "x\0y", "~nobody-of-this-name/a.png"])
def test_a_text_that_can_be_no_path_is_told_in_one_line(value: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as raised:
        encoded(value, places=ImagePlaces(folders=(tmp_path,)), where="dataset: row 3: image 1")
    assert "does not exist" in raised.value.message
    assert len(raised.value.message) < 400
    assert (raised.value.hint is not None) == (len(value) > 80)


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "../one.png",
        "a/../../one.png",
        "~/one.png",
        "file:///etc/passwd",
        "zip://a::file:///etc/passwd",
        "local:///etc/passwd",
    ],
)
def test_a_dataset_from_the_hub_reads_nothing_else_of_this_machine(path: str, tmp_path: Path) -> None:
    places = image_places(DatasetSection(name="somebody/pictures"), folder=tmp_path)
    with pytest.raises(
        DataError, match="is on this machine; a dataset from the hub may name addresses and relative paths"
    ):
        encoded(path, places=places, where="dataset: row 3: image 1")


def test_a_dataset_from_the_hub_may_name_its_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir()
    for file in ("cache/own.png", "beside.png"):
        (tmp_path / file).write_bytes(GOOD)
    monkeypatch.setattr("grpo_cli.data.sources.HF_HUB_CACHE", str(tmp_path / "cache"))
    hub = image_places(DatasetSection(name="somebody/pictures"), folder=tmp_path)
    assert encoded(str(tmp_path / "cache/own.png"), places=hub, where="") == GOOD
    assert encoded("beside.png", places=hub, where="") == GOOD
    assert hub.allow("https://example.org/a.png")
    assert hub.allow("zip://a.png::hf://datasets/somebody/pictures/all.zip")
    with pytest.raises(DataError, match="is on this machine"):
        encoded(str(tmp_path / "beside.png"), places=hub, where="")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    local = image_places(DatasetSection(name="rows.jsonl"), folder=tmp_path)
    assert encoded(str(tmp_path / "beside.png"), places=local, where="") == GOOD
