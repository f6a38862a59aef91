"""Which of many equal warnings are shown."""

from grpo_cli.telemetry.repeats import RepeatedWarnings


def test_a_warning_is_shown_first_and_then_at_powers_of_ten() -> None:
    warnings = RepeatedWarnings()
    shown = {number: text for number in range(1, 1001) if (text := warnings.add("key", f"message {number}"))}
    assert shown == {
        1: "message 1",
        10: "message 10 (10 times)",
        100: "message 100 (100 times)",
        1000: "message 1000 (1000 times)",
    }
    assert warnings.outstanding() == []


def test_repeats_that_were_not_shown_are_told_once_at_the_end() -> None:
    warnings = RepeatedWarnings()
    for key in ("a", "b", "b", "b"):
        warnings.add(key, f"about {key}")
    assert warnings.outstanding() == ["about b (3 times)"]
    assert warnings.outstanding() == []


def test_counts_go_on_after_a_resume_and_the_new_process_shows_the_first_it_meets() -> None:
    before = RepeatedWarnings()
    for _ in range(5):
        before.add("key", "message")
    after = RepeatedWarnings()
    after.load_state_dict(before.state_dict())
    assert after.add("key", "message") == "message (6 times)"
    assert [after.add("key", "message") for _ in range(4)] == [None, None, None, "message (10 times)"]
    assert after.state_dict() == {"key": 10}
    assert after.outstanding() == []


def test_a_warning_of_an_earlier_process_that_did_not_return_is_not_told_again() -> None:
    warnings = RepeatedWarnings()
    warnings.load_state_dict({"old": 7})
    assert warnings.outstanding() == []
    assert warnings.state_dict() == {"old": 7}
