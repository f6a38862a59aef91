"""Numbers, durations and foreign text as a person sees them."""

import math

import pytest

from grpo_cli.telemetry.readable import duration, head_and_tail, magnitude, percent, short, size, tail, visible


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-2.18754, "-2.188"),
        (1e-6, "1e-06"),
        (0.00123456, "0.001235"),
        (1234.0, "1234"),
        (12345.6, "12,346"),
        (1.5e12, "1.5e+12"),
        (math.nan, "-"),
        (math.inf, "inf"),
    ],
)
def test_numbers_have_four_significant_digits(value: float, text: str) -> None:
    assert short(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0s"), (59.94, "59.9s"), (59.96, "1m 00s"), (112, "1m 52s"), (3599.7, "1h 00m"), (11220, "3h 07m"),
        (187200, "2d 04h"),
    ],
)  # fmt: skip
def test_durations_carry_over_at_their_borders(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_other_units() -> None:
    assert [percent(0.125), percent(1.0), percent(math.nan)] == ["12%", "100%", "-"]
    assert [size(512), size(1536), size(1.5 * 2**30), size(2**41)] == ["512 B", "1.5 KiB", "1.5 GiB", "2.0 TiB"]
    assert [magnitude(12), magnitude(134_515_008), magnitude(7_241_000_000)] == ["12", "134.5M", "7.2B"]


def test_control_characters_become_escapes_and_other_text_stays() -> None:
    assert visible("a\nb\tc\r\x1b[2J\x07") == "a\\nb\\tc\\r\\x1b[2J\\x07"
    assert visible("\u202ereversed\u2028\ud800") == "\\u202ereversed\\u2028\\ud800"
    assert visible("größer 数学 🙂 [bold]") == "größer 数学 🙂 [bold]"


@pytest.mark.parametrize("length", range(8, 13))
def test_shortened_texts_keep_within_their_limit(length: int) -> None:
    text = "0123456789"
    assert len(tail(text, length)) <= length
    assert len(head_and_tail(text, length)) <= length
    if length >= len(text):
        assert tail(text, length) == head_and_tail(text, length) == text
    else:
        assert text.endswith(tail(text, length)[1:])
        head, end = head_and_tail(text, length).split("…")
        assert text.startswith(head)
        assert text.endswith(end)
