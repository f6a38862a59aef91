"""Rows with images become the tokens that the model's own processor gives, or an error that names the row."""

import io
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from PIL import Image
from tiny_vision_models import VISION_FAMILIES
from transformers import AutoProcessor, AutoTokenizer

from grpo_cli.data.images import ImagePlaces
from grpo_cli.data.preflight import MEASURED, preflight, preflight_stream
from grpo_cli.data.prompts import PromptBuilder, Rejected, prompt_id
from grpo_cli.data.sampler import PromptSampler
from grpo_cli.data.streaming import StreamingPromptSampler
from grpo_cli.errors import DataError
from grpo_cli.recipe.schema import DatasetSection
from grpo_cli.types import Prompt
from grpo_cli.vision.processor import VisionProcessor

UID = prompt_id(1, 3)
PLACE = {"type": "image"}
MakeBuilder = Callable[..., PromptBuilder]


def picture(seed: int, height: int = 16, width: int = 16) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


RED, BLUE, WIDE = picture(0), picture(1), picture(2, 16, 64)


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


@cache
def processor_of(folder: Path) -> Any:
    return AutoProcessor.from_pretrained(folder)


@pytest.fixture(scope="session")
def make(vision_folder: Callable[[str], Path]) -> MakeBuilder:
    """Make a builder for a family's processor from keys of the recipe's `dataset:`."""

    def builder(
        family: str = "qwen2_5_vl", *, reads_images: bool = True, places: ImagePlaces | None = None, **keys: Any
    ) -> PromptBuilder:
        folder = vision_folder(family)
        vision = VisionProcessor(processor_of(folder)) if reads_images else None
        section = DatasetSection(name="rows", **keys)
        return PromptBuilder(AutoTokenizer.from_pretrained(folder), section, vision=vision, places=places)

    return builder


def build(builder: PromptBuilder, prompt: Any, **columns: Any) -> Prompt:
    outcome = builder.build({"prompt": prompt, **columns}, UID)
    assert isinstance(outcome, Prompt)
    return outcome


def expected_ids(folder: Path, messages: list[Any], images: list[bytes], **arguments: Any) -> list[int]:
    """Ask the processor itself, in one go from messages with images to tokens."""
    pictures = iter(Image.open(io.BytesIO(image)) for image in images)
    turns = [
        {**turn, "content": [{**part, "image": next(pictures)} if part == PLACE else part for part in turn["content"]]}
        for turn in messages
    ]
    arguments = {"add_generation_prompt": True, **arguments}
    encoded = processor_of(folder).apply_chat_template(turns, tokenize=True, return_dict=True, **arguments)
    ids: list[int] = encoded["input_ids"][0]
    return ids


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_tokens_are_those_of_the_processor(
    make: MakeBuilder, vision_folder: Callable[[str], Path], family: str
) -> None:
    turns = [user(text("Compare "), PLACE, text(" with "), PLACE)]
    prompt = build(make(family), turns, images=[RED, WIDE])
    assert list(prompt.ids) == expected_ids(vision_folder(family), turns, [RED, WIDE])
    assert prompt.images == (RED, WIDE)
    assert prompt.messages == tuple(turns)


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_a_row_without_images_has_the_tokens_of_a_text_model(make: MakeBuilder, family: str) -> None:
    for prompt in ([{"role": "user", "content": "Why?"}], "Why?"):
        without: list[dict[str, Any]] = [{"images": []}, {"images": None}, {"image": None}, {}]
        for empty in without:
            among_images = build(make(family, system_prompt="Be brief.", conversational=True), prompt, **empty)
            alone = build(make(family, reads_images=False, system_prompt="Be brief.", conversational=True), prompt)
            assert (among_images.ids, among_images.text) == (alone.ids, alone.text)
            assert among_images.messages == alone.messages
            assert among_images.images == ()


def test_images_without_places_come_before_the_first_users_text(make: MakeBuilder) -> None:
    placed = build(make(), [user(PLACE, PLACE, text("Why?"))], images=[RED, BLUE])
    turn = {"role": "user", "content": "Why?"}
    assert build(make(), [turn], images=[RED, BLUE]).ids == placed.ids
    assert build(make(conversational=True), "Why?", images=[RED, BLUE]).ids == placed.ids
    assert build(make(), [user(text("Why?"))], images=[RED, BLUE]).messages == placed.messages
    later = [{"role": "system", "content": "Look."}, turn, {"role": "assistant", "content": "So."}, turn]
    messages = build(make(), later, image=RED).messages
    assert messages is not None
    assert [message["content"] for message in messages] == ["Look.", [PLACE, text("Why?")], "So.", "Why?"]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": RED},
        {"type": "image", "image": {"bytes": RED, "path": None}, "text": None},
        {"type": "image", "image": Image.open(io.BytesIO(RED))},
    ],
)
def test_images_may_stand_in_the_messages(make: MakeBuilder, part: Any) -> None:
    beside = build(make(), [user(PLACE, text("Why?"), PLACE)], images=[RED, BLUE])
    within = build(make(), [user(part, text("Why?"), PLACE)], images=[BLUE])
    assert within.ids == beside.ids
    assert within.messages == beside.messages
    pixels = [[Image.open(io.BytesIO(image)).tobytes() for image in one.images] for one in (within, beside)]
    assert pixels[0] == pixels[1]


def test_reward_functions_are_given_images_under_the_name_that_the_dataset_has_for_them(make: MakeBuilder) -> None:
    turns = [user(PLACE, text("Why?"))]
    assert build(make(), turns, image={"bytes": RED, "path": None}).row["image"] == RED
    assert build(make(), turns, images=[{"bytes": RED, "path": None}]).row["images"] == [RED]
    within = build(make(), [user({"type": "image", "image": RED}, text("Why?"))])
    assert within.row["images"] == [RED]
    assert "image" not in within.row
    assert build(make(), [user(text("Why?"))]).row["images"] == []
    assert build(make(), [user(text("Why?"))], image=None).row["image"] is None


def test_a_last_assistant_turn_is_continued(make: MakeBuilder, vision_folder: Callable[[str], Path]) -> None:
    turns = [user(PLACE, text("Why?")), {"role": "assistant", "content": [text("Because ")]}]
    prompt = build(make(), turns, image=RED)
    kwargs = {"add_generation_prompt": False, "continue_final_message": True}
    assert list(prompt.ids) == expected_ids(vision_folder("qwen2_5_vl"), turns, [RED], **kwargs)
    assert prompt.text.endswith("Because ")
    assert build(make(), [turns[0], {"role": "assistant", "content": "Because "}], image=RED).ids == prompt.ids


def test_the_system_prompt_and_template_variables_work_with_images(make: MakeBuilder) -> None:
    template = "{{ name }} {% for m in messages %}{% for p in m.content %}{{ p.text or '<|image_pad|>' }}{% endfor %}|{% endfor %}"
    builder = make(system_prompt="Look.", chat_template_kwargs={"chat_template": template, "name": "recipe"})
    assert build(builder, [user(text("Why?"))], image=RED).text == "recipe Look.|<|image_pad|>Why?|"
    from_row = build(builder, [user(text("Why?"))], image=RED, chat_template_kwargs={"name": "row"})
    assert from_row.text == "row Look.|<|image_pad|>Why?|"


@pytest.mark.parametrize(
    ("prompt", "columns", "message"),
    [
        (
            [user(PLACE, text("a"))],
            {"images": [RED, BLUE]},
            "the messages have 1 place(s) for images of the row, which has 2",
        ),
        ([user(PLACE, text("a"))], {"images": []}, "the messages have 1 place(s) for images of the row, which has 0"),
        (
            [user({**PLACE, "image": RED})],
            {"image": BLUE},
            "the messages have 0 place(s) for images of the row, which has 1",
        ),
        ([{"role": "system", "content": "a"}], {"image": RED}, "no message has the role user"),
        ("a", {"image": RED}, "prompt is a string, which has no place for images"),
        (
            [user(text("a"))],
            {"images": [RED, b"?"]},
            "image 2 (column `images`) cannot be read: its format is not known",
        ),
        ([user({**PLACE, "image": b"?"})], {}, "image 1 (column `prompt`) cannot be read: its format is not known"),
        ([user(text("a <|image_pad|>"))], {"image": RED}, "the model's processor refuses the prompt with 1 image(s)"),
    ],
)
def test_what_does_not_fit_together_names_the_row(make: MakeBuilder, prompt: Any, columns: Any, message: str) -> None:
    with pytest.raises(DataError) as raised:
        build(make(), prompt, **columns)
    assert raised.value.message.startswith("dataset: row 3: ")
    assert message in raised.value.message


@pytest.mark.parametrize(
    ("given", "column", "source"),
    [
        ({"image": RED[:60]}, "photo", ""),
        ({"image": {"bytes": RED[:60], "path": "a/1.png"}}, "photo", " from a/1.png"),
        ({"image": "half.png"}, "photo", " from half.png"),
        ({"images": [Path("half.png")]}, "images", " from half.png"),
        ({"prompt": [user({**PLACE, "path": "half.png"}, text("a"))]}, "prompt", " from half.png"),
    ],
)
def test_an_image_that_is_cut_short_is_blamed_itself(
    make: MakeBuilder, given: Any, column: str, source: str, tmp_path: Path
) -> None:
    """Its head is sound, so that it shows only when its pixels are read."""
    (tmp_path / "half.png").write_bytes(RED[:60])
    builder = make(conversational=True, columns={"image": "photo"}, places=ImagePlaces(folders=(tmp_path,)))
    with pytest.raises(DataError) as raised:
        builder.build({"prompt": "a", **given}, UID)
    start, end = f"dataset: row 3: image 1 (column `{column}`) cannot be read{source}: ", "truncated (60 bytes)"
    assert raised.value.message.startswith(start)
    assert raised.value.message.endswith(end)
    assert raised.value.hint is None


def test_a_text_with_an_images_token_and_no_image_is_rejected(make: MakeBuilder) -> None:
    outcome = make().build({"prompt": [user(text("a <|image_pad|>"))]}, UID)
    assert outcome == Rejected(reason="the text has tokens that stand for images")


@pytest.mark.parametrize("policy", ["drop", "truncate_left"])
def test_a_prompt_with_images_is_never_cut(make: MakeBuilder, policy: Any) -> None:
    row = {"prompt": [user(PLACE, text("Why? " * 20))], "image": RED}
    length = len(build(make(), **row).ids)
    at_the_limit = make(max_prompt_length=length, max_prompt_length_policy=policy).build(row, UID)
    assert isinstance(at_the_limit, Prompt)
    assert len(at_the_limit.ids) == length
    below = make(max_prompt_length=length - 1, max_prompt_length_policy=policy)
    assert below.build(row, UID) == Rejected(reason=f"prompt with images is longer than {length - 1} tokens")
    without = below.build({"prompt": "x" * 2 * length, "image": None}, UID)
    assert isinstance(without, Prompt if policy == "truncate_left" else Rejected)


def test_an_error_for_a_long_prompt_says_how_many_tokens_are_for_images(make: MakeBuilder) -> None:
    row = {"prompt": [user(PLACE, text("Why?"))], "image": RED}
    prompt = build(make(), **row)
    of_images = (16 // 4 // 2) ** 2  # patches of four pixels, four of them one token
    with pytest.raises(DataError) as raised:
        make(max_prompt_length=4, max_prompt_length_policy="error").build(row, UID)
    assert f"the prompt has {len(prompt.ids)} tokens, {of_images} of them for images" in raised.value.message


def test_the_fingerprint_knows_what_becomes_of_images(make: MakeBuilder, vision_folder: Callable[[str], Path]) -> None:
    folder = vision_folder("qwen2_5_vl")
    section, tokenizer = DatasetSection(name="rows"), AutoTokenizer.from_pretrained(folder)
    larger = AutoProcessor.from_pretrained(folder, size={"shortest_edge": 64, "longest_edge": 4096})
    prints = [
        PromptBuilder(tokenizer, section, vision=vision).fingerprint()
        for vision in (None, VisionProcessor(processor_of(folder)), VisionProcessor(larger))
    ]
    assert len(set(prints)) == 3
    assert make().fingerprint() == prints[1]


def mixed_rows(count: int, sizes: Mapping[int, bytes] | None = None) -> Dataset:
    """Rows whose images are all of one size, but those of a few; one in four has none."""
    images = [None if number % 4 == 3 else (sizes or {}).get(number, RED) for number in range(count)]
    return Dataset.from_dict({"prompt": [f"Row {number:03}" for number in range(count)], "image": images})


def test_all_rows_are_told_of_and_a_share_is_prepared(make: MakeBuilder) -> None:
    builder = make(conversational=True)
    rows = mixed_rows(200)
    all_of_them, share = (preflight(rows, builder, measured=measured) for measured in (None, 20))
    assert share.kept == all_of_them.kept
    assert all_of_them.unmeasured == 0
    assert 150 - share.unmeasured == 20, "every tenth row, of which each has an image"
    assert "images: 150 of 200 prompts, 1 each; image tokens of a prompt: mean 4.0, up to 4" in all_of_them.lines()
    assert "that were prepared; the others are when they are drawn" in "".join(share.lines())
    assert all(isinstance(row["image"], bytes | None) for row in rows)


@pytest.mark.parametrize("count", [257, 512, 1024])
def test_no_more_are_prepared_than_is_said(make: MakeBuilder, count: int) -> None:
    """Also where the first row has no image, so that another one than those spread evenly comes first."""
    rows = Dataset.from_dict({"prompt": ["Row"] * count, "image": [None, *([RED] * (count - 1))]})
    found = preflight(rows, make(conversational=True))
    assert found.images is not None
    assert MEASURED / 2 <= found.images.measured <= MEASURED
    assert found.first_with_images is not None
    assert found.first_with_images.uid == "0:1"


def test_a_stream_says_what_its_first_rows_have(make: MakeBuilder) -> None:
    found = preflight_stream(mixed_rows(100).to_iterable_dataset(), make(conversational=True))
    assert "images: 48 of 64 prompts, 1 each; image tokens of a prompt: mean 4.0, up to 4" in found.lines()


def test_rows_that_turn_out_too_long_are_passed_over_and_the_order_goes_on(make: MakeBuilder) -> None:
    rows = mixed_rows(80, {41: WIDE, 62: WIDE})
    normal = len(build(make(conversational=True), "Row 000", image=RED).ids)
    builder = make(conversational=True, max_prompt_length=normal)
    complete, share = (preflight(rows, builder, measured=measured) for measured in (None, 2))
    reason = f"prompt with images is longer than {normal} tokens"
    assert complete.rejected[reason].first_rows == (41, 62)
    assert share.rejected == {}
    sampler = PromptSampler(rows, builder, share, seed=0, shuffle=True)
    order = [
        prompt.uid
        for prompt in PromptSampler(rows, make(conversational=True), complete, seed=0, shuffle=False).take(78)
    ]
    drawn = [prompt.uid for prompt in sampler.take(50)]
    state = sampler.state_dict()
    drawn += [prompt.uid for prompt in sampler.take(28)]
    assert sorted(drawn) == sorted(order)
    assert sampler.rejected == {reason: 2}
    assert sampler.epoch == 1.0
    resumed = PromptSampler(rows, builder, share, seed=0, shuffle=True)
    resumed.load_state_dict(state)
    assert [prompt.uid for prompt in resumed.take(28)] == drawn[50:]


def test_another_image_is_another_dataset(make: MakeBuilder) -> None:
    builder = make(conversational=True)
    samplers = [
        PromptSampler(rows, builder, preflight(rows, builder), seed=0, shuffle=False)
        for rows in (mixed_rows(8), mixed_rows(8, {0: BLUE}))
    ]
    with pytest.raises(DataError, match="content was"):
        samplers[1].load_state_dict(samplers[0].state_dict())


def test_a_stream_draws_images(make: MakeBuilder) -> None:
    rows = mixed_rows(6).to_iterable_dataset()
    sampler = StreamingPromptSampler(rows, make(conversational=True), seed=0, shuffle=False, buffer_size=1)
    assert [prompt.images for prompt in sampler.take(4)] == [(RED,), (RED,), (RED,), ()]
