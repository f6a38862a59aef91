"""Generated questions: the same for the same arguments, never the same on both sides, and wrong arguments are named."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from optional_packages import needs_reasoning_gym

from grpo_cli.data.reasoning import questions
from grpo_cli.data.sources import load_rows
from grpo_cli.errors import DataError
from grpo_cli.recipe.schema import DatasetSection

SUMS = {"chain_sum": {"min_terms": 2, "max_terms": 2, "max_digits": 1}}
"""Two terms of 0 to 9, plus or minus: 200 questions."""

MIXED: dict[str, Any] = {"chain_sum": {"weight": 3}, "spell_backward": None, "word_sorting": {"max_words": 4}}

IN_ANOTHER_PROCESS = """
import json, sys
from grpo_cli.data.reasoning import questions
print(json.dumps(list(questions(**json.loads(sys.argv[1])))))
"""

pytestmark = needs_reasoning_gym


def texts(rows: Any) -> list[str]:
    return [row["prompt"][0]["content"] for row in rows]


def refused(**arguments: Any) -> DataError:
    """Give the error that a recipe with these arguments ends in."""
    section = DatasetSection(name="grpo_cli.data.reasoning.questions", arguments=arguments)
    with pytest.raises(DataError) as raised:
        load_rows(section, folder=Path())
    assert "\n" not in raised.value.message
    return raised.value


def test_rows_have_the_columns_that_prompts_and_rewards_read() -> None:
    section = DatasetSection(name="grpo_cli.data.reasoning.questions", arguments={"tasks": SUMS, "size": 5})
    for row in load_rows(section, folder=Path()):
        assert list(row) == ["prompt", "task", "answer", "entry"]
        entry = json.loads(row["entry"])
        assert row["prompt"] == [{"role": "user", "content": entry["question"]}]
        assert (row["task"], row["answer"]) == ("chain_sum", entry["answer"])
        left, sign, right = re.findall(r"\d+|[+-]", entry["question"])
        assert int(row["answer"]) == int(left) + int(right) * (1 if sign == "+" else -1)


def test_an_instruction_stands_after_each_question() -> None:
    plain = texts(questions(tasks=MIXED, size=20))
    told = texts(questions(tasks=MIXED, size=20, instruction="Be brief."))
    assert told == [f"{question}\nBe brief." for question in plain]


def test_equal_arguments_give_equal_rows_in_every_process() -> None:
    arguments: dict[str, Any] = {"tasks": MIXED, "size": 60, "seed": 3}
    rows = list(questions(**arguments))
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, json.dumps(arguments)]
    output = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    assert json.loads(output) == rows


def test_more_of_them_begin_with_the_same() -> None:
    assert texts(questions(tasks=MIXED, size=60))[:20] == texts(questions(tasks=MIXED, size=20))


def test_seeds_that_are_neighbours_give_other_questions() -> None:
    """The generators of reasoning-gym themselves give the same ones, one place on."""
    first, second = (set(texts(questions(tasks={"chain_sum": {}}, size=200, seed=seed))) for seed in (0, 1))
    assert len(first & second) < 20


def test_all_questions_are_different_and_none_is_on_both_sides() -> None:
    trained = [texts(questions(tasks=SUMS, size=100, seed=seed)) for seed in range(3)]
    held_out = [texts(questions(tasks=SUMS, size=20, seed=seed, held_out=True)) for seed in range(3)]
    assert all(len(set(side)) == len(side) for side in (*trained, *held_out))
    assert set().union(*trained).isdisjoint(set().union(*held_out))


def test_the_two_sides_together_are_all_there_is() -> None:
    counts = []
    for held_out in (False, True):
        error = refused(tasks=SUMS, size=300, held_out=held_out)
        counts.append(int(re.findall(r"only (\d+) different questions", error.message)[0]))
        assert error.hint == ("lower dataset.arguments.size, or widen dataset.arguments.tasks.chain_sum")
    assert sum(counts) == 200
    assert 20 <= counts[1] <= 60  # a fifth, give or take


def test_tasks_are_drawn_by_weight() -> None:
    drawn = Counter(questions(tasks=MIXED, size=500)["task"])
    assert drawn["chain_sum"] == pytest.approx(300, abs=50)
    assert drawn["spell_backward"] == pytest.approx(100, abs=40)


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (
            {"tasks": {"chain_sums": {}}},
            "dataset.arguments.tasks.chain_sums: reasoning-gym has no such task",
            "did you mean `chain_sum`?",
        ),
        (
            {"tasks": {"chain_sum": {"max_term": 2}}},
            "dataset.arguments.tasks.chain_sum.max_term: no such setting; allowed: weight, min_terms, max_terms, min_digits",
            "did you mean `max_terms`?",
        ),
        ({"tasks": {"chain_sum": {"seed": 2}}}, "dataset.arguments.tasks.chain_sum.seed: no such setting", None),
        (
            {"tasks": {"chain_sum": {"max_terms": 1}}},
            "dataset.arguments.tasks.chain_sum: max_terms must be >= min_terms",
            None,
        ),
        ({"tasks": {"chain_sum": {"max_terms": "two"}}}, "dataset.arguments.tasks.chain_sum: '>=' not supported", None),
        ({"tasks": {"chain_sum": 2}}, "dataset.arguments.tasks.chain_sum: found 2; allowed: settings by name", None),
        (
            {"tasks": {"chain_sum": {"weight": 0}}},
            "dataset.arguments.tasks.chain_sum.weight: found 0; allowed: a number above 0",
            None,
        ),
        ({"tasks": ["chain_sum"]}, "dataset.arguments.tasks: found ['chain_sum']; allowed: task names", "chain_sum: {"),
        ({"tasks": {}}, "dataset.arguments.tasks: found {}; allowed: task names", None),
        ({"tasks": SUMS, "size": 0}, "dataset.arguments.size: found 0; allowed: at least 1", None),
        ({"tasks": SUMS, "sead": 0}, "unexpected keyword argument 'sead'", "keyword arguments"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], message: str, hint: str | None) -> None:
    error = refused(**{"size": 10, **arguments})
    assert message in error.message
    assert hint is None or hint in str(error.hint)


def test_without_the_package_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # as if it were not there
    error = refused(tasks=SUMS, size=10)
    assert error.message.endswith("needs reasoning-gym, which is not installed")
    assert error.hint == "pip install 'grpo-cli[reasoning]'"
