r"""Boxed answers as text, and answers as mathematics."""

import os
import signal
import threading
import time

import pytest

from rewards.accuracy import boxed, last_boxed, math
from rewards.equivalence import Verifier


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{7}", "7"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{\frac{1}{\sqrt{2}}}.", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\}}", r"\}"),
        (r"\boxed{5} and \boxed{unfinished", "5"),
        (r"\fbox {3}", "3"),
        (r"\boxed{}", ""),
        (r"\boxed{never", None),
        ("7", None),
    ],
)
def test_last_boxed_finds_the_last_complete_box(text: str, inside: str | None) -> None:
    assert last_boxed(text) == inside


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        (r"\boxed{42}", "42", 1.0),
        (r"\boxed{ 42 .}", 42, 1.0),
        (r"\boxed{42}", 42.0, 1.0),
        (r"\boxed{1,000}", "1000", 1.0),
        (r"\boxed{1,2}", "12", 0.0),
        (r"\boxed{\dfrac{1}{2}}", r"\frac{1}{2}", 1.0),
        (r"\boxed{\left(1,\, 2\right)}", "(1,2)", 1.0),
        (r"\boxed{\leftarrow}", "arrow", 0.0),
        (r"\boxed{\text{Paris}}", "Paris", 1.0),
        (r"\boxed{7}", r"Adding up gives $\boxed{7}$.", 1.0),
        (r"\boxed{0.5}", r"\frac{1}{2}", 0.0),
        ("42", "42", 0.0),
        (r"\boxed{}", "42", 0.0),
        (r"\boxed{42}", None, None),
    ],
)
def test_boxed_compares_text_after_light_normalisation(answer: str, truth: object, expected: float | None) -> None:
    assert boxed(completions=[answer], ground_truth=[truth]) == [expected]
    assert boxed(completions=[[{"role": "assistant", "content": answer}]], ground_truth=[truth]) == [expected]


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        (r"My answer is \boxed{\frac{2}{6}}", r"\frac{1}{3}", 1.0),
        (r"My answer is \boxed{\frac{1}{2}}", r"\frac{1}{3}", 0.0),
        (r"\boxed{0.5}", "1/2", 1.0),
        (r"\boxed{2}", r"2\pi", 0.0),
        (r"\boxed{2\pi}", r"2\pi", 1.0),
        (r"\boxed{x+1}", "1+x", 1.0),
        (r"\boxed{3}", "x=3", 1.0),
        (r"\boxed{(1,2)}", "(1, 2)", 1.0),
        (r"\boxed{1000}", "1,000", 1.0),
        (r"\boxed{41}. Wait, \boxed{42}", "42", 1.0),
        (r"\boxed{42}. Wait, \boxed{41}", "42", 0.0),
        ("The final answer is $42$.", "42", 1.0),
        ("The answer is 42", "42", 1.0),
        ("I saw 42 birds", "42", 0.0),
        ("", "42", 0.0),
        (r"\boxed{7}", r"Therefore $n = 7$, and the answer is $\boxed{7}$.", 1.0),
        (r"\boxed{7}", "no answer is known", None),
        (r"\boxed{7}", "", None),
    ],
)
def test_math_compares_as_mathematics(answer: str, truth: str, expected: float | None) -> None:
    assert math(completions=[answer], ground_truth=[truth]) == [expected]
    assert math(completions=[[{"role": "assistant", "content": answer}]], solution=[truth]) == [expected]


def test_math_prefers_the_solution_and_falls_back_row_by_row() -> None:
    answers = [r"\boxed{1}"] * 3
    assert math(completions=answers, ground_truth=["1", "1", None], solution=["2", None, None]) == [0.0, 1.0, None]


def test_math_without_a_column_says_which_it_needs() -> None:
    with pytest.raises(ValueError, match="needs a dataset column `ground_truth` or `solution`"):
        math(completions=["1"])


def test_math_works_off_the_main_thread() -> None:
    found: list[list[float | None]] = []
    thread = threading.Thread(
        target=lambda: found.append(math(completions=[r"\boxed{2}"] * 2, ground_truth=["2", "3"]))
    )
    thread.start()
    thread.join()
    assert found == [[1.0, 0.0]]


def test_an_answer_that_cannot_be_computed_in_time_is_wrong_and_costs_no_more_than_the_deadline() -> None:
    verifier = Verifier(deadline_seconds=0.5)
    try:
        assert verifier.verdict("42", r"\boxed{42}") == 1.0
        started = time.monotonic()
        assert verifier.verdict("42", r"\boxed{(10^{10})!}") == 0.0
        assert time.monotonic() - started < 3
        assert verifier.verdict("42", r"\boxed{42}") == 1.0  # in a new process
    finally:
        verifier.close()


def test_a_killed_verifier_is_replaced() -> None:
    verifier = Verifier()
    try:
        assert verifier.verdict("1", r"\boxed{1}") == 1.0
        assert verifier._process._process is not None
        os.kill(verifier._process._process.pid, signal.SIGKILL)
        verifier._process._process.wait()
        assert verifier.verdict("1", r"\boxed{2}") == 0.0
        assert verifier.verdict("1", r"\boxed{1}") == 1.0
    finally:
        verifier.close()
