"""The shipped rewards against their formulas, in both formats."""

import importlib
import inspect
import math
import pkgutil
from functools import partial
from typing import Any

import pytest

import rewards
from rewards.code import PassedTests
from rewards.cosine import cosine_scaled
from rewards.diversity import unique_characters
from rewards.format import think, think_answer
from rewards.judge import Judge
from rewards.length import close_to_characters, close_to_tokens, num_characters, num_tokens
from rewards.overlong import soft_overlong_punishment
from rewards.repetition import repetition_penalty
from rewards.text import text_of


def as_messages(texts: list[str]) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def of_length(*lengths: int) -> list[list[int]]:
    return [list(range(length)) for length in lengths]


TEXTS = ["aab", "", "x" * 25, "<think>a</think><answer>b</answer>", r"so \boxed{2}"]


@pytest.mark.parametrize(
    ("function", "columns"),
    [
        (num_characters, {}),
        (close_to_characters, {}),
        (unique_characters, {}),
        (think, {}),
        (think_answer, {}),
    ],
)
def test_both_formats_give_the_same_reward(function: Any, columns: dict[str, Any]) -> None:
    standard = function(completions=TEXTS, **columns)
    assert function(completions=as_messages(TEXTS), **columns) == standard
    assert len(set(standard)) > 1


def shipped_functions() -> list[Any]:
    return [
        function
        for module in pkgutil.iter_modules(rewards.__path__)
        if module.name not in {"text", "answering", "independence"}
        and not module.name.endswith(("equivalence", "_process"))
        for name, function in inspect.getmembers(importlib.import_module(f"rewards.{module.name}"), inspect.isfunction)
        if function.__module__ == f"rewards.{module.name}" and not name.startswith("_") and name != "last_boxed"
    ]


def test_every_shipped_reward_ignores_other_columns_and_says_where_it_comes_from() -> None:
    functions = shipped_functions()
    assert len(functions) == 15
    for function in [*functions, PassedTests, Judge]:
        called: Any = getattr(function, "__call__") if isinstance(function, type) else function  # noqa: B004, B009
        kinds = [parameter.kind for parameter in inspect.signature(called).parameters.values()]
        assert inspect.Parameter.VAR_KEYWORD in kinds, function
        assert "Source:" in (function.__doc__ or ""), function


def test_shipped_functions_give_a_completion_the_same_reward_alone_and_among_others() -> None:
    """All but those that share something between calls say so of themselves, which many processes rely on."""
    answers = ["2", "2", "7", "b", "2"]
    columns: dict[str, list[Any]] = {
        "prompts": ["p", "p", "p", "q", "q"],
        "completions": TEXTS,
        "completion_ids": of_length(*map(len, TEXTS)),
        "ground_truth": answers,
        "solution": [f"${answer}$" for answer in answers],
    }
    bound = {
        "soft_overlong_punishment": {"max_completion_length": 30, "soft_punish_cache": 10},
        "cosine_scaled": {"max_completion_length": 30},
        "repetition_penalty": {"ngram_size": 2},
    }
    told = 0
    for function in shipped_functions():
        assert vars(function).get("independent") is True, function
        if function.__module__ == "rewards.reasoning":  # its questions are generated: see test_reasoning.py
            continue
        call = partial(function, **bound.get(function.__name__, {}))
        together = call(**columns)
        apart = [call(**{name: [values[row]] for name, values in columns.items()})[0] for row in range(len(TEXTS))]
        assert together == apart, function
        told += len({repr(one) for one in together}) > 1
    assert told >= 10


def test_text_joins_messages_and_text_parts() -> None:
    parts = [{"type": "text", "text": "see "}, {"type": "image"}, {"type": "text", "text": "this"}]
    assert text_of([{"role": "assistant", "content": parts}]) == "see this"
    assert text_of([{"role": "assistant", "content": None}, {"role": "assistant", "content": "b"}]) == "b"


def test_length_rewards_count_characters_and_tokens() -> None:
    assert num_characters(completions=["abc", ""], scale=2) == [1.5, 0.0]
    assert num_tokens(completion_ids=of_length(4, 1), scale=-2) == [-2.0, -0.5]
    assert close_to_characters(completions=["x" * 20, "x" * 17, "x" * 24]) == [0, -3, -4]
    assert close_to_characters(completions=["x" * 10], target=20, scale=20) == [-0.5]
    assert close_to_tokens(completion_ids=of_length(3, 10), target=5) == [-2, -5]


def test_unique_characters_counts_each_once() -> None:
    assert unique_characters(completions=["hello", "aaa", ""]) == [4.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a\nb</think>\n<answer>c</answer>", 1.0),
        ("<think></think><answer></answer>", 1.0),
        (" <think>a</think> <answer>b</answer>\n", 1.0),
        ("<think>a</think><answer>b</answer> more", 0.0),
        ("first <think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think> between <answer>b</answer>", 0.0),
        ("<think>a<think>b</think></think><answer>c</answer>", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<think>a<answer>b</answer>", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
    ],
)
def test_think_answer_wants_both_blocks_once_and_nothing_else(text: str, expected: float) -> None:
    assert think_answer(completions=[text]) == [expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\nThis is my reasoning.\n</think>\nThis is my answer.", 1.0),
        ("<think>\nThis is my reasoning.\nThis is my answer.", 0.0),
        ("Well. <think>a</think> b", 0.0),
        ("<think>a</think> b <think>c</think>", 0.0),
        ("a</think> b", 0.0),
    ],
)
def test_think_wants_one_block_at_the_start(text: str, expected: float) -> None:
    assert think(completions=[text]) == [expected]


def test_overlong_punishment_follows_the_three_pieces_of_dapo_equation_13() -> None:
    reward = soft_overlong_punishment(
        completion_ids=of_length(0, 80, 81, 90, 100, 101), max_completion_length=100, soft_punish_cache=20
    )
    assert reward == [0.0, 0.0, -1 / 20, -10 / 20, -1.0, -1.0]


def test_overlong_punishment_without_cache_is_a_step() -> None:
    assert soft_overlong_punishment(
        completion_ids=of_length(100, 101), max_completion_length=100, soft_punish_cache=0
    ) == [0.0, -1.0]


def test_overlong_punishment_refuses_a_cache_above_the_limit() -> None:
    with pytest.raises(ValueError, match=r"soft_punish_cache is 11; allowed is 0 to max_completion_length \(10\)"):
        soft_overlong_punishment(completion_ids=[[1]], max_completion_length=10, soft_punish_cache=11)


def test_repetition_penalty_is_the_share_of_repeated_ngrams() -> None:
    # [5]*5 has 4 bigrams, 1 different; [1, 2, 1, 2] has 3, 2 different; a single token has none.
    ids = [[1, 2, 3, 4], [5] * 5, [1, 2, 1, 2], [7], []]
    assert repetition_penalty(completion_ids=ids, ngram_size=2, max_penalty=-2.0) == pytest.approx(
        [0.0, -2 * 3 / 4, -2 / 3, 0.0, 0.0]
    )


def test_repetition_penalty_refuses_a_reward_for_repetition() -> None:
    with pytest.raises(ValueError, match=r"max_penalty is 1.0; allowed is at most 0"):
        repetition_penalty(completion_ids=[[1]], max_penalty=1.0)
    with pytest.raises(ValueError, match="ngram_size is 0; allowed is at least 1"):
        repetition_penalty(completion_ids=[[1]], ngram_size=0)


def test_cosine_runs_from_the_short_to_the_long_value_and_stays_there() -> None:
    lengths = (0, 25, 50, 100, 150)
    truths = ["2"] * len(lengths)
    right = cosine_scaled(
        completions=[r"\boxed{2}"] * 5,
        completion_ids=of_length(*lengths),
        ground_truth=truths,
        max_completion_length=100,
        correctness="boxed",
    )
    wrong = cosine_scaled(
        completions=as_messages([r"\boxed{3}"] * 5),
        completion_ids=of_length(*lengths),
        ground_truth=truths,
        max_completion_length=100,
        correctness="boxed",
    )
    quarter = math.cos(math.pi / 4)
    assert right == pytest.approx([1.0, 0.75 + 0.25 * quarter, 0.75, 0.5, 0.5])
    assert wrong == pytest.approx([-1.0, -0.75 - 0.25 * quarter, -0.75, -0.5, -0.5])


def test_cosine_uses_mathematics_by_default_and_passes_none_on() -> None:
    rewards_ = cosine_scaled(
        completions=[r"\boxed{\frac{2}{6}}", r"\boxed{1}", r"\boxed{1}"],
        completion_ids=of_length(50, 50, 50),
        solution=[r"\frac{1}{3}", r"\frac{1}{3}", "hello"],
        max_completion_length=100,
    )
    assert rewards_ == [pytest.approx(0.75), pytest.approx(-0.75), None]


def test_cosine_gives_the_exceed_value_at_the_limit_only() -> None:
    assert cosine_scaled(
        completions=[r"\boxed{1}"] * 2,
        completion_ids=of_length(99, 100),
        ground_truth=["1", "1"],
        max_completion_length=100,
        min_value_correct=1.0,
        exceed_value=-10.0,
        correctness="boxed",
    ) == [1.0, -10.0]


def test_cosine_refuses_what_it_cannot_use() -> None:
    with pytest.raises(ValueError, match="correctness is 'exact'; allowed is 'math' or 'boxed'"):
        cosine_scaled([""], [[1]], ["1"], max_completion_length=1, correctness="exact")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs a dataset column `ground_truth`"):
        cosine_scaled([""], [[1]], max_completion_length=1, correctness="boxed")
    with pytest.raises(ValueError, match="max_completion_length is 0; allowed is at least 1"):
        cosine_scaled([""], [[1]], ["1"], max_completion_length=0)
