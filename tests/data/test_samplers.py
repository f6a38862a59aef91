"""Order and resume of both samplers: a function of seed and epoch, nothing lost, every place can be returned to."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, IterableDataset
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import build_tiny_tokenizer

from grpo_cli.data.preflight import preflight
from grpo_cli.data.prompts import PromptBuilder
from grpo_cli.data.sampler import PromptSampler, PromptSource
from grpo_cli.data.sources import load_rows
from grpo_cli.data.streaming import StreamingPromptSampler
from grpo_cli.errors import DataError
from grpo_cli.recipe.schema import DatasetSection
from grpo_cli.types import Prompt

TOKENIZER = build_tiny_tokenizer()
PROMPTS = [
    *[f"prompt {index}" for index in range(5)],
    "",
    "prompt 6",
    None,
    *[f"prompt {index}" for index in range(8, 12)],
]
USABLE = [prompt for prompt in PROMPTS if prompt]

Make = Callable[..., PromptSource]


def mapped(prompts: list[Any] = PROMPTS, *, seed: int = 0, shuffle: bool = True, **keys: Any) -> PromptSampler:
    rows = Dataset.from_dict({"prompt": prompts})
    builder = PromptBuilder(TOKENIZER, DatasetSection(name="rows", **keys))
    return PromptSampler(rows, builder, preflight(rows, builder), seed=seed, shuffle=shuffle)


def streamed(
    prompts: list[Any] = PROMPTS, *, seed: int = 0, shuffle: bool = True, **keys: Any
) -> StreamingPromptSampler:
    rows = Dataset.from_dict({"prompt": prompts}).to_iterable_dataset(num_shards=2 if len(prompts) > 2 else 1)
    builder = PromptBuilder(TOKENIZER, DatasetSection(name="rows", **keys))
    return StreamingPromptSampler(rows, builder, seed=seed, shuffle=shuffle, buffer_size=4)


both = pytest.mark.parametrize("make", [mapped, streamed])


def texts(prompts: list[Prompt]) -> list[str]:
    return [prompt.text for prompt in prompts]


def epochs(source: PromptSource, count: int) -> list[list[str]]:
    return [texts(source.take(len(USABLE))) for _ in range(count)]


@both
def test_every_epoch_draws_every_usable_row_once(make: Make) -> None:
    for epoch in epochs(make(), 3):
        assert sorted(epoch) == sorted(USABLE)


@both
def test_orders_differ_between_epochs_and_seeds_and_can_be_reproduced(make: Make) -> None:
    orders = epochs(make(seed=1), 3) + epochs(make(seed=2), 3)
    assert len({tuple(order) for order in orders}) == 6
    assert epochs(make(seed=1), 3) == orders[:3]


@both
def test_without_shuffling_the_order_is_the_dataset_s(make: Make) -> None:
    assert epochs(make(shuffle=False), 2) == [USABLE, USABLE]


@both
def test_how_many_are_taken_at_once_does_not_matter(make: Make) -> None:
    at_once, one_by_one = make(), make()
    assert at_once.take(25) == [one_by_one.take(1)[0] for _ in range(25)]
    assert at_once.take(0) == []


@both
def test_some_of_what_is_drawn_are_those_of_all(make: Make) -> None:
    """Also across the end of an epoch; and those that nobody asks for are drawn all the same."""
    some, everything = make(), make()
    for places in ([0, 3, 11, 12], [], [14]):
        drawn = everything.take(15)
        assert some.take(15, places) == [drawn[place] for place in places]
    assert some.state_dict() == everything.state_dict()


def test_only_prompts_that_are_asked_for_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of thousands pays for its own. Those of a stream all have to be read."""
    sampler = mapped()
    built: list[int] = []
    encode = PromptBuilder.encode

    def counted(builder: PromptBuilder, rows: Any, uids: Any, **options: Any) -> Any:
        built.append(len(rows))
        return encode(builder, rows, uids, **options)

    monkeypatch.setattr(PromptBuilder, "encode", counted)
    for places in ([0, 3, 11, 12], [], [14]):
        sampler.take(15, places)
    assert built == [4, 0, 1]


@both
def test_a_prompt_is_named_by_epoch_and_row_and_no_name_comes_twice(make: Make) -> None:
    prompts = make().take(3 * len(USABLE))
    assert len({prompt.uid for prompt in prompts}) == len(prompts)
    assert [prompt.uid.split(":")[0] for prompt in prompts] == [str(epoch) for epoch in range(3) for _ in USABLE]


def test_the_row_in_a_name_is_the_row_of_the_dataset() -> None:
    for prompt in mapped().take(2 * len(USABLE)):
        assert PROMPTS[int(prompt.uid.split(":")[1])] == prompt.text


def test_the_order_of_a_seed_never_changes() -> None:
    """Checkpoints refer to it. The names were written down from the first version."""
    prompts = mapped(["a", "b", "c", "d", "e"], seed=42).take(10)
    assert [prompt.uid for prompt in prompts] == ["0:4", "0:0", "0:3", "0:1", "0:2", "1:3", "1:0", "1:2", "1:1", "1:4"]


@both
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_run_resumed_anywhere_equals_an_uninterrupted_one(make: Make, data: st.DataObject) -> None:
    total = 2 * len(USABLE) + 3
    stop = data.draw(st.integers(0, total), label="stop")
    keys = {
        "seed": data.draw(st.integers(0, 2**31), label="seed"),
        "shuffle": data.draw(st.booleans(), label="shuffle"),
    }
    whole, before, after = make(**keys), make(**keys), make(**keys)
    expected = whole.take(total)
    assert before.take(stop) == expected[:stop]
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert (after.epoch, dict(after.rejected)) == (before.epoch, dict(before.rejected))
    assert after.take(total - stop) == expected[stop:]
    assert after.state_dict() == whole.state_dict()


@both
def test_every_place_of_two_epochs_can_be_resumed(make: Make) -> None:
    total = 2 * len(USABLE) + 1
    expected = make().take(total)
    walking = make()
    for place in range(total):
        resumed = make()
        resumed.load_state_dict(walking.state_dict())
        assert resumed.take(total - place) == expected[place:]
        walking.take(1)


@both
def test_a_sampler_can_be_taken_back(make: Make) -> None:
    sampler = make()
    sampler.take(4)
    state = sampler.state_dict()
    expected = sampler.take(12)
    sampler.load_state_dict(state)
    assert sampler.take(12) == expected


def test_progress_is_a_fraction_of_the_usable_rows() -> None:
    sampler = mapped()
    assert (sampler.rows_per_epoch, sampler.epoch) == (10, 0.0)
    sampler.take(15)
    assert sampler.epoch == 1.5
    assert sampler.rejected == {"prompt is empty": 1, "prompt is null": 1}


def test_progress_of_a_stream_is_the_epochs_it_completed() -> None:
    sampler = streamed()
    assert (sampler.rows_per_epoch, sampler.epoch) == (None, 0.0)
    sampler.take(len(USABLE) + 1)
    assert sampler.epoch == 1.0
    first_epoch = {"prompt is empty": 1, "prompt is null": 1}
    assert all(sampler.rejected[reason] >= count for reason, count in first_epoch.items())


def test_a_stream_gives_the_prompts_of_the_map_style_dataset() -> None:
    assert texts(streamed(shuffle=False).take(23)) == texts(mapped(shuffle=False).take(23))


@both
@pytest.mark.parametrize(
    ("prompts", "keys", "message"),
    [
        (["another", *PROMPTS[1:]], {}, r"content was \w+, is \w+"),
        (PROMPTS, {"seed": 7}, "seed was 0, is 7"),
        (PROMPTS, {"shuffle": False}, "shuffle was true, is false"),
        (PROMPTS, {"max_prompt_length": 500}, r"prompt settings was \w+, is \w+"),
    ],
)
def test_resuming_with_other_data_is_refused(
    make: Make, prompts: list[Any], keys: dict[str, Any], message: str
) -> None:
    sampler = make()
    sampler.take(3)
    other = make(prompts, **keys)
    with pytest.raises(DataError, match=message) as raised:
        other.load_state_dict(sampler.state_dict())
    assert "not the one that the checkpoint was made with" in raised.value.message
    assert "start a new run" in str(raised.value.hint)


def test_a_change_in_the_last_row_is_noticed() -> None:
    with pytest.raises(DataError, match="content was"):
        mapped([*PROMPTS[:-1], "changed"]).load_state_dict(mapped().state_dict())


def test_resuming_with_fewer_rows_is_refused() -> None:
    sampler = mapped()
    with pytest.raises(DataError, match="rows was 12, is 11; usable rows was 10, is 9"):
        mapped(PROMPTS[:-1]).load_state_dict(sampler.state_dict())
    stream = streamed(shuffle=False)
    stream.take(9)
    shorter = streamed(PROMPTS[:8], shuffle=False)
    with pytest.raises(DataError, match="the stream ended after 8 rows; the checkpoint was made after 11"):
        shorter.load_state_dict(stream.state_dict())


def test_a_stream_without_prompts_is_an_error_and_not_an_endless_loop() -> None:
    with pytest.raises(
        DataError, match=r"no row of a whole epoch gives a prompt: prompt is empty \(2\), prompt is null \(1\)"
    ):
        streamed(["", None, ""]).take(1)


def test_a_limited_stream_draws_the_same_first_rows_in_every_epoch(tmp_path: Path) -> None:
    for part in range(3):
        rows = [json.dumps({"prompt": f"{part}{row}"}) + "\n" for row in range(4)]
        (tmp_path / f"{part}.jsonl").write_text("".join(rows))
    section = DatasetSection(name="*.jsonl", streaming=True, max_rows=6)
    rows = load_rows(section, folder=tmp_path)
    sampler = StreamingPromptSampler(rows, PromptBuilder(TOKENIZER, section), seed=0, shuffle=True, buffer_size=10)
    orders = [texts(sampler.take(6)) for _ in range(4)]
    assert all(sorted(order) == ["00", "01", "02", "03", "10", "11"] for order in orders)
    assert len({tuple(order) for order in orders}) > 1


@pytest.mark.parametrize("shuffle", [False, True])
def test_conversations_in_a_file_give_the_same_prompts_mapped_and_streamed(tmp_path: Path, shuffle: bool) -> None:
    """Turns with different keys, and template variables in some rows only: what is not set must not reach the template."""
    user = {"role": "user", "content": "Hi", "name": "Ada"}
    rows = [
        {"prompt": [user], "chat_template_kwargs": {"mark": "!"}},
        {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
        {"prompt": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So"}]},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = (
        "{% for m in messages %}{{ m.role }}{{ m.keys() | length }}{{ mark }}:{{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    keys: dict[str, Any] = {"name": "rows.jsonl", "chat_template_kwargs": {"chat_template": template, "mark": "?"}}
    expected = {"user3!:Hi assistant:", "system2?:Be brief. user2?:Hi assistant:", "user2?:Hi assistant2?:So"}
    mapped_section, stream_section = DatasetSection(**keys), DatasetSection(**keys, streaming=True)
    in_memory = load_rows(mapped_section, folder=tmp_path)
    builder = PromptBuilder(TOKENIZER, mapped_section)
    sampler = PromptSampler(in_memory, builder, preflight(in_memory, builder), seed=0, shuffle=shuffle)
    stream = load_rows(stream_section, folder=tmp_path)
    streaming = StreamingPromptSampler(stream, builder, seed=0, shuffle=shuffle, buffer_size=3)
    assert set(texts(sampler.take(3))) == expected
    assert set(texts(streaming.take(3))) == expected


def test_a_stream_that_cannot_be_read_names_the_row() -> None:
    def rows() -> Any:
        yield {"prompt": "a"}
        yield {"prompt": "b"}
        if reading[0]:
            raise OSError("connection lost")

    reading = [False]
    stream = IterableDataset.from_generator(rows)
    sampler = StreamingPromptSampler(
        stream, PromptBuilder(TOKENIZER, DatasetSection(name="rows")), seed=0, shuffle=False, buffer_size=1
    )
    assert texts(sampler.take(3)) == ["a", "b", "a"]
    reading[0] = True
    with pytest.raises(DataError, match=r"reading row 2 of epoch 1 failed: .*connection lost"):
        sampler.take(2)


def test_a_dataset_that_changes_under_the_run_is_noticed() -> None:
    rows = Dataset.from_dict({"prompt": ["a", "b"]})
    builder = PromptBuilder(TOKENIZER, DatasetSection(name="rows"))
    found = preflight(rows, builder)
    emptied = rows.with_transform(lambda batch: {"prompt": [""] * len(batch["prompt"])})
    with pytest.raises(DataError, match="row 0 gave a prompt when all rows were read, and now prompt is empty"):
        PromptSampler(emptied, builder, found, seed=0, shuffle=False).take(1)
