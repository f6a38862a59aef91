"""What is expected of k tries at a prompt, from n of them."""

from collections import Counter
from collections.abc import Sequence
from math import comb


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Chance that at least one of k completions is correct: 1 - C(n - c, k) / C(n, k).

    It is the share of all choices of k out of the n completions that hold a correct one, and so an unbiased estimate whatever n is
    (Chen et al. 2021, arXiv:2107.03374, eq. 1). With k = 1 it is c / n.

    Args:
        samples: n, the prompt's completions.
        correct: c, those of them that are correct.
        k: Tries, at most n.
    """
    assert 0 <= correct <= samples, (samples, correct)
    assert 1 <= k <= samples, (samples, k)
    choices = comb(samples, k)
    return (choices - comb(samples - correct, k)) / choices  # of integers: no digit is lost


def majority_success(answers: Sequence[str | None], successes: Sequence[float]) -> float:
    """Success of the answer that most completions give (Wang et al. 2022, arXiv:2203.11171).

    Where several are given equally often it is the mean over them: what is expected if one is drawn. The success of an answer is the mean
    over the completions that give it; they need not agree where success is more than the answer, such as its form. Completions
    without an answer have no vote. Nobody votes: 0.

    Args:
        answers: Of each completion; None: it has none.
        successes: Of each completion, 0 or 1.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = {answer: 0.0 for answer, count in votes.items() if count == most}
    for answer, success in zip(answers, successes, strict=True):
        if answer in winners:
            winners[answer] += success / most
    return sum(winners.values()) / len(winners)
