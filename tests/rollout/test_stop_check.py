"""When completions end: stop tokens and stop strings, grown token by token as the engine does."""

from collections.abc import Callable
from typing import Any

import pytest

from grpo_cli.rollout.local.stops import StopCheck
from grpo_cli.types import Sampling

Settings = Callable[..., Sampling]


def length_at_end(tokenizer: Any, sampling: Sampling, ids: list[int]) -> int | None:
    """Feed a completion token by token; after how many it has ended."""
    check = StopCheck(tokenizer, sampling)
    for length in range(1, len(ids) + 1):
        if check.ended([ids[:length]]) == [True]:
            return length
    return None


@pytest.mark.parametrize(
    ("text", "strings", "expected"),
    [
        ("one, two", ("two",), "one, two"),
        ("one\n\ntwo", ("\n\n",), "one\n\n"),
        ("aaab", ("aab",), "aaab"),
        ("Frage: ja. Größe é", ("öß",), "Frage: ja. Größ"),
        ("a 🙂 b", ("🙂",), "a 🙂"),
        ("🙂🙂🙂🙂.", (".",), "🙂🙂🙂🙂."),
        ("first second", ("second", "irs"), "firs"),
        ("x" * 100 + "END", ("END",), "x" * 100 + "END"),
        ("nothing of the kind", ("kinds",), None),
    ],
)
def test_a_stop_string_ends_a_completion_with_its_last_byte(
    text: str, strings: tuple[str, ...], expected: str | None, tokenizer: Any, settings: Settings
) -> None:
    ids = tokenizer(text)["input_ids"]
    length = length_at_end(tokenizer, settings(stop_strings=strings), ids)
    assert (None if length is None else tokenizer.decode(ids[:length])) == expected


def test_special_tokens_inside_a_stop_string_do_not_hide_it(tokenizer: Any, settings: Settings) -> None:
    """They do not show in the text either."""
    specials = [256] * 40
    ids = [*tokenizer("wait, ST")["input_ids"], *specials, *tokenizer("OP!")["input_ids"]]
    assert length_at_end(tokenizer, settings(stop_strings=("STOP",)), ids) == len(ids) - 1


def test_a_stop_string_before_min_tokens_does_not_count_and_a_later_one_does(
    tokenizer: Any, settings: Settings
) -> None:
    ids = tokenizer("a;bcdefg;h")["input_ids"]
    assert length_at_end(tokenizer, settings(stop_strings=(";",)), ids) == 2
    assert length_at_end(tokenizer, settings(stop_strings=(";",), min_tokens=4), ids) == 9
    assert length_at_end(tokenizer, settings(stop_strings=(";",), min_tokens=9), ids) == 9


def test_a_stop_string_of_several_bytes_counts_once_it_is_complete(tokenizer: Any, settings: Settings) -> None:
    ids = tokenizer("ab🙂c")["input_ids"]
    assert length_at_end(tokenizer, settings(stop_strings=("🙂",), min_tokens=5), ids) == 6


def test_each_completion_is_judged_by_its_own_tokens(tokenizer: Any, settings: Settings) -> None:
    check = StopCheck(tokenizer, settings(stop_ids=(257, 5), stop_strings=("no",)))
    completions = [[1, 257], [257, 1], tokenizer("no")["input_ids"], [5], tokenizer("on")["input_ids"]]
    assert check.ended(completions) == [True, False, True, True, False]


def test_no_completions_have_no_answers(tokenizer: Any, settings: Settings) -> None:
    assert StopCheck(tokenizer, settings(stop_strings=("x",))).ended([]) == []
