"""pass@k and maj@k against enumeration and closed forms."""

from itertools import combinations
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_cli.evaluation.estimators import majority_success, pass_at_k


@pytest.mark.parametrize("samples", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_choices_with_a_correct_completion(samples: int) -> None:
    for correct in range(samples + 1):
        completions = [True] * correct + [False] * (samples - correct)
        for k in range(1, samples + 1):
            choices = [any(choice) for choice in combinations(completions, k)]
            assert pass_at_k(samples, correct, k) == pytest.approx(sum(choices) / len(choices), abs=1e-15)


@given(st.integers(1, 40), st.floats(0, 1), st.data())
def test_pass_at_k_is_unbiased(samples: int, chance: float, data: st.DataObject) -> None:
    """Over all outcomes of n tries that succeed with a chance p, its mean is that of k tries: 1 - (1 - p)^k."""
    k = data.draw(st.integers(1, samples))
    expected = sum(
        comb(samples, correct) * chance**correct * (1 - chance) ** (samples - correct) * pass_at_k(samples, correct, k)
        for correct in range(samples + 1)
    )
    assert expected == pytest.approx(1 - (1 - chance) ** k, abs=1e-9)


def test_pass_at_k_is_exact_for_many_completions() -> None:
    """A product of floats, as others compute it, is off here: only one choice in C(1000, 500) holds no correct completion."""
    assert pass_at_k(1000, 500, 500) == 1.0
    assert pass_at_k(1000, 1, 1) == 1 / 1000
    assert pass_at_k(10_000, 1, 5_000) == 0.5


@given(st.lists(st.tuples(st.sampled_from([None, "a", "b", "c"]), st.sampled_from([0.0, 1.0])), max_size=8))
def test_a_majority_is_what_drawing_a_winner_and_one_of_its_completions_gives(
    votes: list[tuple[str | None, float]],
) -> None:
    answers, successes = [answer for answer, _ in votes], [success for _, success in votes]
    counts = {answer: answers.count(answer) for answer in answers if answer is not None}
    winners = [answer for answer, count in counts.items() if count == max(counts.values())]
    # All winners have equally many completions, so that these can be drawn all at once.
    drawn = [success for answer, success in votes if answer in winners]
    assert majority_success(answers, successes) == pytest.approx(sum(drawn) / len(drawn) if drawn else 0.0)


@pytest.mark.parametrize(
    ("answers", "successes", "expected"),
    [
        (["4", "4", "5"], [1, 1, 0], 1.0),
        (["5", "5", "4"], [0, 0, 1], 0.0),
        (["4", "5"], [1, 0], 0.5),
        ([None, None, "4"], [0, 0, 1], 1.0),
        ([None, None], [0, 0], 0.0),
        (["4", "4", "5"], [1, 0, 1], 0.5),
    ],
)
def test_the_most_frequent_answer_counts(answers: list[str | None], successes: list[float], expected: float) -> None:
    assert majority_success(answers, successes) == expected
