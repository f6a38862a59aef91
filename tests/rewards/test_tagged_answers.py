"""Answers in `<answer>` blocks: as text, as letters of choices, as mathematics."""

import pytest

from rewards.accuracy import tagged

THOUGHT = "<think> Perhaps <b>{}</b>, or 7. </think>\n<answer> {} </answer>"


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        ("5", "5", 1.0),
        ("5", "6", 0.0),
        ("Yes.", "yes", 1.0),
        ("a dog", "a cat", 0.0),
        ("B", "B", 1.0),
        ("B. 5", "B", 1.0),
        ("(B)", "B. 5", 1.0),
        ("A. 5", "B. 5", 0.0),
        ("Both", "B", 0.0),
        ("5", "B", 0.0),
        (r"\frac{2}{4}", "$0.5$", 1.0),
        (r"44^\circ", r"$44^{\circ}$", 1.0),
        ("3/5", "0.6", 1.0),
        ("x = 3", "3", 1.0),
        (r"\boxed{12}", "12", 1.0),
    ],
)
@pytest.mark.parametrize("form", ["text", "messages"])
def test_an_answer_counts_in_every_form_that_means_the_same(
    answer: str, truth: str, expected: float, form: str
) -> None:
    text = THOUGHT.format(truth, answer)
    completion = text if form == "text" else [{"role": "assistant", "content": text}]
    other = THOUGHT.format(answer, truth)  # the truth is in the block, not in the thought
    assert tagged([completion], ground_truth=[truth]) == [expected]
    assert tagged([completion], solution=[other]) == [expected]


def test_the_last_block_counts_and_there_must_be_one() -> None:
    texts = ["<answer>1</answer> no: <answer>2</answer>", "2", "<answer>2", "<answer></answer>"]
    assert tagged(texts, ground_truth=[2] * 4) == [1.0, 0.0, 0.0, 0.0]


def test_a_truth_that_is_missing_does_not_count_and_a_solution_goes_first() -> None:
    texts = ["<answer>2</answer>"] * 3
    assert tagged(texts, ground_truth=[None, 2.0, 3], solution=[None, None, "<answer>2</answer>"]) == [None, 1.0, 1.0]
    with pytest.raises(ValueError, match=r"`ground_truth` or `solution`"):
        tagged(texts)
