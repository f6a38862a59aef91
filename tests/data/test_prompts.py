"""A row becomes the tokens that the tokenizer itself would give, or a named rejection, or an error that names the row."""

from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from grpo_cli.data.messages import read_messages
from grpo_cli.data.prompts import PromptBuilder, Rejected, prompt_id
from grpo_cli.errors import DataError
from grpo_cli.types import Prompt

Builder = Callable[..., PromptBuilder]
UID = prompt_id(1, 3)
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Why?"}


def assistant(content: Any, **others: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **others}


def build(builder: PromptBuilder, prompt: Any, **columns: Any) -> Prompt:
    outcome = builder.build({"prompt": prompt, **columns}, UID)
    assert isinstance(outcome, Prompt)
    return outcome


def reason(builder: PromptBuilder, prompt: Any) -> str:
    outcome = builder.build({"prompt": prompt}, UID)
    assert isinstance(outcome, Rejected)
    return outcome.reason


def test_a_string_is_tokenized_as_it_is(builder: Builder) -> None:
    prompt = build(builder(), "Why? ü", answer=7)
    assert prompt.ids == tuple(builder()._tokenizer("Why? ü")["input_ids"])
    assert (prompt.uid, prompt.text, prompt.messages) == ("1:3", "Why? ü", None)
    assert prompt.row == {"prompt": "Why? ü", "answer": 7}


def test_messages_end_with_the_generation_prompt(builder: Builder, tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = build(builder(), [USER])
    assert prompt.text == "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    assert list(prompt.ids) == tokenizer.apply_chat_template([USER], add_generation_prompt=True)["input_ids"]
    assert prompt.messages == (USER,)


def test_a_string_becomes_a_user_message_in_a_conversational_dataset(builder: Builder) -> None:
    as_string, as_messages = build(builder(conversational=True), "Why?"), build(builder(), [USER])
    assert (as_string.ids, as_string.text, as_string.messages) == (as_messages.ids, as_messages.text, (USER,))
    assert as_string.row == {"prompt": "Why?"}


def test_the_system_prompt_goes_in_front_unless_there_is_one(builder: Builder) -> None:
    make = builder(system_prompt="Be brief.")
    assert build(make, [USER]).messages == (SYSTEM, USER)
    for role in ("system", "developer"):
        own = {"role": role, "content": "Be kind."}
        assert build(make, [own, USER]).messages == (own, USER)


def test_a_last_assistant_turn_is_continued(builder: Builder, tokenizer: PreTrainedTokenizerFast) -> None:
    turns = [USER, assistant("Because of ")]
    prompt = build(builder(), turns)
    assert prompt.text == "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nBecause of "
    assert list(prompt.ids) == tokenizer.apply_chat_template(turns, continue_final_message=True)["input_ids"]
    assert prompt.messages == tuple(turns)


@pytest.mark.parametrize("last", [assistant(""), assistant(None), {"role": "assistant"}, assistant([])])
def test_continuing_an_empty_assistant_turn_is_starting_one(builder: Builder, last: dict[str, Any]) -> None:
    prompt = build(builder(), [USER, last])
    assert prompt.ids == build(builder(), [USER]).ids
    assert prompt.messages == (USER,)


def test_an_assistant_turn_of_text_parts_is_continued(builder: Builder, tokenizer: PreTrainedTokenizerFast) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}: {% for part in m['content'] %}{{ part.text }}{% endfor %}|{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        assistant([{"type": "text", "text": "Yes"}]),
    ]
    prompt = build(builder(chat_template_kwargs={"chat_template": template}), turns)
    assert prompt.text == "user: Hi|assistant: Yes"


def test_an_assistant_turn_of_tool_calls_is_not_lost(builder: Builder) -> None:
    with pytest.raises(DataError, match="row 3: the last turn is an assistant's without content but with tool_calls"):
        build(builder(), [USER, assistant(None, tool_calls=[{"name": "search"}])])


def test_template_variables_come_from_the_recipe_and_then_from_the_row(builder: Builder) -> None:
    make = builder(chat_template_kwargs={"chat_template": "{{ a }} {{ b }}", "a": "recipe", "b": "recipe"})
    assert build(make, [USER]).text == "recipe recipe"
    assert build(make, [USER], chat_template_kwargs=None).text == "recipe recipe"
    assert build(make, [USER], chat_template_kwargs={"a": "row", "b": None}).text == "row recipe"


def test_keys_that_a_column_of_structs_fills_with_none_are_not_seen_by_the_template(builder: Builder) -> None:
    make = builder(chat_template_kwargs={"chat_template": "{{ 'name' in messages[0] }}{{ 'content' in messages[0] }}"})
    assert build(make, [{**USER, "name": None}]).text == "FalseTrue"


@pytest.mark.parametrize("text", ["Why?", "<|endoftext|>Why?"])
def test_a_string_starts_with_one_bos(builder: Builder, bos_tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert list(build(builder(tokenizer=bos_tokenizer), text).ids) == bos_tokenizer("Why?")["input_ids"]


def test_a_template_that_writes_bos_gives_one_bos(builder: Builder, bos_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = build(builder(tokenizer=bos_tokenizer), [USER]).ids
    assert ids[0] == bos_tokenizer.bos_token_id
    assert ids.count(bos_tokenizer.bos_token_id) == 1


def test_prompts_tokenized_together_are_those_tokenized_one_by_one(
    builder: Builder, bos_tokenizer: PreTrainedTokenizerFast
) -> None:
    make = builder(tokenizer=bos_tokenizer)
    rows = [
        {"prompt": prompt}
        for prompt in ("a", [USER], "<|endoftext|>b", "", [USER, assistant("So")], None, "long " * 30)
    ]
    uids = [prompt_id(0, index) for index in range(len(rows))]
    assert make.encode(rows, uids) == [make.encode([row], [uid])[0] for row, uid in zip(rows, uids, strict=True)]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (None, "prompt is null"),
        ("", "prompt is empty"),
        (" \n", "prompt is empty"),
        ([], "prompt is empty"),
        ([{"role": "user", "content": ""}], "prompt is empty"),
        ([assistant(None)], "prompt is empty"),
        ([{"role": "user", "content": None}, assistant("x")], "a message has no content"),
    ],
)
def test_a_prompt_without_text_is_rejected_with_a_reason(builder: Builder, prompt: Any, expected: str) -> None:
    assert reason(builder(), prompt) == expected
    assert reason(builder(conversational=True), prompt) == expected


def test_a_template_that_writes_nothing_is_rejected(builder: Builder) -> None:
    assert reason(builder(chat_template_kwargs={"chat_template": "{{ '' }}"}), [USER]) == "prompt has no tokens"


def test_a_prompt_of_the_longest_length_is_kept_whole(builder: Builder) -> None:
    for policy in ("drop", "truncate_left", "error"):
        prompt = build(builder(max_prompt_length=5, max_prompt_length_policy=policy), "12345")
        assert prompt.text == "12345"


def test_a_longer_prompt_is_dropped_with_a_reason(builder: Builder) -> None:
    assert reason(builder(max_prompt_length=5), "123456") == "prompt is longer than 5 tokens"


def test_a_longer_prompt_is_cut_from_the_left(builder: Builder, tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = build(builder(max_prompt_length=5, max_prompt_length_policy="truncate_left"), "0123456789")
    assert prompt.text == "56789"
    assert list(prompt.ids) == tokenizer("56789")["input_ids"]
    assert prompt.row == {"prompt": "0123456789"}


def test_a_cut_prompt_keeps_its_bos(builder: Builder, bos_tokenizer: PreTrainedTokenizerFast) -> None:
    make = builder(tokenizer=bos_tokenizer, max_prompt_length=4, max_prompt_length_policy="truncate_left")
    prompt = build(make, "0123456789")
    assert list(prompt.ids) == bos_tokenizer("789")["input_ids"]
    assert prompt.text == "<|endoftext|>789"


def test_a_longer_prompt_is_an_error_that_names_row_and_length(builder: Builder) -> None:
    make = builder(max_prompt_length=5, max_prompt_length_policy="error")
    with pytest.raises(
        DataError, match=r"row 3: the prompt has 6 tokens; allowed by dataset\.max_prompt_length: 5"
    ) as raised:
        build(make, "123456")
    assert "drop or truncate_left" in str(raised.value.hint)


def test_messages_without_a_chat_template_say_what_to_do(
    builder: Builder, bos_tokenizer: PreTrainedTokenizerFast
) -> None:
    template, bos_tokenizer.chat_template = bos_tokenizer.chat_template, None
    try:
        with pytest.raises(
            DataError, match="row 3: the prompt is a list of messages, but the tokenizer has no"
        ) as raised:
            build(builder(tokenizer=bos_tokenizer), [USER])
    finally:
        bos_tokenizer.chat_template = template
    assert "model.chat_template_path" in str(raised.value.hint)
    assert "conversational off" in str(raised.value.hint)


def test_a_template_that_refuses_the_prompt_is_quoted(builder: Builder) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match="row 3: the chat template refuses the prompt: roles must alternate"):
        build(builder(chat_template_kwargs={"chat_template": template}), [USER])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (7, "row 3: prompt is int; allowed: a string, or a list of messages"),
        ({"role": "user"}, "row 3: prompt is dict; allowed"),
        (["Why?"], "row 3: message 0 is str; allowed: a mapping with `role` and `content`"),
        ([USER, {"from": "human", "value": "x"}], "row 3: message 1 has no `role`; it has from, value"),
        (
            [{"role": "user", "content": 5}],
            "row 3: message 0: content is int; allowed: a string or a list of parts",
        ),
        ([None], "row 3: message 0 is null"),
        ([{"role": None, "content": "x"}], "row 3: message 0 has no `role`; it has content"),
        ([{"role": "user", "content": [{"type": "audio"}]}], "row 3: message 0: content has a part of type audio"),
        ([{"role": "user", "content": [{"type": None, "text": "x"}]}], "content has a part without a type"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "content has a text without `text`"),
        ([{"role": "user", "content": [None]}], "message 0: content has null"),
        ([{"role": "user", "content": ["x"]}], "message 0: content has str as a part"),
        ([{"role": "user", "content": [{"type": "image"}]}], "row 3: a message has an image, but no row before it has"),
    ],
)
def test_an_unsupported_prompt_names_row_and_type(builder: Builder, prompt: Any, message: str) -> None:
    with pytest.raises(DataError) as raised:
        build(builder(), prompt)
    assert message in raised.value.message


def test_template_variables_that_are_no_mapping_are_refused(builder: Builder) -> None:
    with pytest.raises(DataError, match="row 3: chat_template_kwargs is str; allowed: a mapping"):
        build(builder(), [USER], chat_template_kwargs="thinking")


def test_a_system_prompt_for_a_plain_string_is_refused(builder: Builder) -> None:
    with pytest.raises(DataError, match=r"prompt is a string, which has no place for dataset\.system_prompt") as raised:
        build(builder(system_prompt="Be brief."), "Why?")
    assert "dataset.conversational" in str(raised.value.hint)


@pytest.mark.parametrize(
    ("columns", "example"),
    [
        (["promt", "answer"], "{prompt: promt}"),
        (["question", "answer"], "{prompt: question}"),
        (["a"], "{prompt: your_column}"),
    ],
)
def test_a_missing_prompt_column_suggests_a_mapping(builder: Builder, columns: list[str], example: str) -> None:
    with pytest.raises(DataError, match=f"no column `prompt`; it has {', '.join(columns)}") as raised:
        builder().build(dict.fromkeys(columns, "x"), UID)
    assert "dataset.columns" in str(raised.value.hint)
    assert example in str(raised.value.hint)


def test_reading_messages_leaves_the_row_as_it_was() -> None:
    column = [{"role": "user", "content": "x", "name": None}]
    read_messages(column, where="row 0")
    assert column == [{"role": "user", "content": "x", "name": None}]
