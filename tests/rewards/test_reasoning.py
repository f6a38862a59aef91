"""Answers to generated tasks: found in the text, and judged by the task's own scorer."""

import json
import sys
import time
from typing import Any

import pytest
from optional_packages import needs_reasoning_gym

from rewards.answering import AnsweringProcess
from rewards.reasoning import correct, score

pytestmark = needs_reasoning_gym


def entry(task: str, answer: str, question: str = "", **metadata: Any) -> str:
    """What the dataset puts beside a question."""
    return json.dumps({"task": task, "configuration": {}, "question": question, "answer": answer, "metadata": metadata})


SUM = entry("chain_sum", "1007")


def rewards(extraction: str, *texts: str) -> list[float | None]:
    """Score plain texts and messages, which must be the same."""
    plain = correct(completions=texts, entry=[SUM] * len(texts), extraction=extraction)  # type: ignore[arg-type]
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    assert correct(completions=messages, entry=[SUM] * len(texts), extraction=extraction) == plain  # type: ignore[arg-type]
    return plain


@pytest.mark.parametrize(
    ("extraction", "right", "wrong"),
    [
        (
            "tags",
            ["<answer>1007</answer>", "no <answer>5</answer> but\n<answer>\n1007\n</answer> it is"],
            ["1007", "<answer>1007", "<answer>1007</answer> or <answer>5</answer>", ""],
        ),
        ("boxed", [r"\boxed{1007}", r"\boxed{5}, no: \boxed{1007}"], ["1007", r"\boxed{1007} \boxed{5}", ""]),
        (
            "number",
            ["1007", "It is 1,007.", "1000+7=1007", "5, no: 1007.0 birds"],
            ["-1007", "1007 of 1008", "x1007", "one thousand and seven", ""],
        ),
        ("text", ["1007", " 1007\n"], ["It is 1007", "1007 it is", ""]),
    ],
)
def test_the_answer_is_found_where_it_should_stand(extraction: str, right: list[str], wrong: list[str]) -> None:
    assert rewards(extraction, *right) == [1.0] * len(right)
    assert rewards(extraction, *wrong) == [0.0] * len(wrong)


def test_a_negative_number_keeps_its_sign_and_a_difference_has_none() -> None:
    minus = entry("chain_sum", "-3")
    assert correct(completions=["5 - 8 = -3", "5-8 is 3"], entry=[minus] * 2, extraction="number") == [1.0, 0.0]
    assert correct(completions=["from 8-3"], entry=[entry("chain_sum", "3")], extraction="number") == [1.0]


def test_rows_of_another_kind_are_left_to_other_rewards() -> None:
    assert correct(completions=["<answer>1007</answer>"] * 2, entry=[None, SUM]) == [None, 1.0]


def test_answers_are_logged() -> None:
    logged: dict[str, Any] = {}
    correct(completions=["<answer> 5 </answer>", "5"], entry=[SUM, None], log_extra=logged.__setitem__)
    assert logged == {"answer": ["5", None]}


def test_the_score_is_the_tasks_own_and_only_the_full_one_is_correct() -> None:
    """Word sorting gives 0.2 for the right words in the wrong order (reasoning_gym/algorithmic/word_sorting.py)."""
    words = entry("word_sorting", "ant, bee", sorted_words=["ant", "bee"])
    texts = ["ant, bee", "bee, ant", "cat"]
    assert score(completions=texts, entry=[words] * 3, extraction="text") == [1.0, 0.2, 0.0]
    assert correct(completions=texts, entry=[words] * 3, extraction="text") == [1.0, 0.0, 0.0]


def test_an_unknown_place_for_the_answer_is_refused() -> None:
    with pytest.raises(ValueError, match="extraction is 'tag'; allowed is 'tags', 'boxed', 'number', 'text'"):
        correct(completions=[""], entry=[SUM], extraction="tag")  # type: ignore[arg-type]


def test_an_entry_of_no_task_stops_the_run_and_does_not_count_as_wrong() -> None:
    with pytest.raises(ValueError, match="cannot make the task of an entry: ValueError: Dataset 'sums' not registered"):
        correct(completions=["1"], entry=[entry("sums", "1")], extraction="text")


def test_an_answer_that_breaks_or_outlasts_its_scorer_is_wrong() -> None:
    """Countdown computes the answer with sympy; the power has more digits than any memory holds."""
    countdown = json.loads(entry("countdown", "1 + 2", numbers=[1, 2], target=3))
    process = AnsweringProcess("reasoning_process.py", needs="reasoning-gym", deadline_seconds=2)
    try:
        assert process.ask({"entry": countdown, "answer": "1 + 2"}) == {"score": 1.0}
        assert process.ask({"entry": countdown, "answer": "1 + ("}) == {
            "score": 0.01
        }  # what countdown gives to any answer
        started = time.monotonic()
        assert process.ask({"entry": countdown, "answer": "9**9**9**9"}) is None
        assert time.monotonic() - started < 5
        assert process.ask({"entry": countdown, "answer": "2 + 1"}) == {"score": 1.0}  # in a new process
    finally:
        process.close()


def test_an_answer_that_is_evaluated_gets_some_memory_and_no_more() -> None:
    """N-queens gives 0.5 to an answer that evaluates to a right board (reasoning_gym/games/n_queens.py)."""
    queens = entry("n_queens", "Q", valid_answers=["Q"])
    texts = [f"[['Q']] if bytes({size}) else None" for size in (2**20, 8 * 2**30)]
    assert score(completions=texts, entry=[queens] * 2, extraction="text", allow_unconfined=True) == [0.5, 0.0]


def test_an_answer_is_not_evaluated_unasked() -> None:
    queens = entry("n_queens", "Q", valid_answers=["Q"])
    for function in (correct, score):
        with pytest.raises(
            ValueError, match=r"the scorer of 'n_queens' runs an answer as Python.*allow_unconfined: true"
        ):
            function(completions=["[['Q']]"], entry=[queens], extraction="text")


def test_without_the_package_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # as if it were not there
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'grpo-cli\[reasoning\]'"):
        correct(completions=["1"], entry=[SUM])
