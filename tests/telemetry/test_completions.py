"""Completion files, read back as a user would."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from grpo_cli.telemetry.completions import CompletionFiles, completion_table
from grpo_cli.telemetry.records import Evaluation, Rollouts
from grpo_cli.types import ScoredGroup

Maker = Callable[..., ScoredGroup]
NAN = math.nan


def test_training_completions_read_back_with_their_rewards_and_advantages(tmp_path: Path, make_scored: Maker) -> None:
    groups = [
        make_scored(["a", "b"], [[1.0, NAN], [0.5, 2.0]], uid="0:4", lengths=[3, 9], stopped=[True, False]),
        make_scored(["c", "d"], [[0.0, 1.0], [NAN, NAN]], uid="0:1", prompt="Ask."),
    ]
    advantages = [torch.tensor([0.75, -0.75]), torch.tensor([0.0, 0.0])]
    CompletionFiles(tmp_path, ["length", "format"]).write_training(10, Rollouts(scored=groups, advantages=advantages))
    table = pq.read_table(tmp_path / "completions" / "train-000010.parquet")
    assert table.to_pydict() == {
        "step": [10] * 4,
        "prompt_uid": ["0:4", "0:4", "0:1", "0:1"],
        "index": [0, 1, 0, 1],
        "prompt": ["Say hi.", "Say hi.", "Ask.", "Ask."],
        "completion": ["a", "b", "c", "d"],
        "finish_reason": ["stop", "length", "stop", "stop"],
        "num_tokens": [3, 9, 3, 3],
        "policy_version": [7] * 4,
        "reward/length": [1.0, 0.5, 0.0, None],
        "reward/format": [None, 2.0, 1.0, None],
        "advantage": [0.75, -0.75, 0.0, 0.0],
    }


def test_evaluation_completions_lie_apart_by_dataset_and_have_no_advantage(tmp_path: Path, make_scored: Maker) -> None:
    tables = {
        name: completion_table([make_scored(["a"], [[value]])], ["length"], step=10)
        for name, value in ((None, 1.0), ("math", 0.5))
    }
    CompletionFiles(tmp_path, ["other"]).write_evaluation(Evaluation(step=10, metrics={}, tables=tables))
    for name, value in (("000010", 1.0), ("math-000010", 0.5)):
        table = pq.read_table(tmp_path / "eval" / f"{name}.parquet")
        assert "advantage" not in table.column_names
        assert table["reward/length"].to_pylist() == [value]


class Stock:
    """Has a method of the name that scalars have, too."""

    def item(self, name: str) -> str:
        return name

    def __str__(self) -> str:
        return "a stock"


@pytest.mark.parametrize(
    ("logged", "kept", "kind"),
    [
        ((1, 2, None), [1, 2, None], "int64"),
        ((1, 2.5, None), [1.0, 2.5, None], "double"),
        ((True, False, None), [True, False, None], "bool"),
        (("x", None, "y"), ["x", None, "y"], "string"),
        ((1, "x", True), ["1", "x", "True"], "string"),
        ((True, 2, 3), ["True", "2", "3"], "string"),
        (([1, 2], {"a": 1}, None), ["[1, 2]", "{'a': 1}", None], "string"),
        ((2**70, 1, 2), [str(2**70), "1", "2"], "string"),
        ((2**70, 1.5, 2), [str(2**70), "1.5", "2"], "string"),
        ((None, None, None), [None, None, None], "null"),
        ((np.float32(0.5), torch.tensor(0.25), 1), [0.5, 0.25, 1.0], "double"),
        ((torch.tensor([1, 2]), "x", None), ["tensor([1, 2])", "x", None], "string"),
        ((Stock(), "x", None), ["a stock", "x", None], "string"),
    ],
)
def test_logged_columns_keep_their_type_or_become_text(
    make_scored: Maker, logged: tuple[object, ...], kept: list[object], kind: str
) -> None:
    table = completion_table([make_scored("abc", [[0.0]] * 3, extras={"r/note": logged})], ["r"], step=1)
    assert table["note"].to_pylist() == kept
    assert str(table.schema.field("note").type) == kind


def test_a_group_that_did_not_log_a_column_has_nulls_in_it(make_scored: Maker) -> None:
    groups = [make_scored("ab", [[0.0]] * 2), make_scored("cd", [[0.0]] * 2, extras={"r/note": ("x", "y")})]
    assert completion_table(groups, ["r"], step=1)["note"].to_pylist() == [None, None, "x", "y"]


def test_of_two_functions_that_log_one_name_the_later_one_s_is_named_after_it(make_scored: Maker) -> None:
    """Whichever of them logged it for which group; a column that one of them alone logged has its name."""
    groups = [
        make_scored("a", [[0.0, 1.0]], extras={"second/note": ("second's",), "second/own": (1,)}),
        make_scored("b", [[0.0, 1.0]], extras={"first/note": ("first's",)}),
    ]
    for given in (groups, groups[::-1]):
        table = completion_table(given, ["first", "second"], step=1)
        rows = {row["completion"]: (row["note"], row["second/note"], row["own"]) for row in table.to_pylist()}
        assert rows == {"a": (None, "second's", 1), "b": ("first's", None, None)}


def test_a_logged_column_never_hides_one_of_ours(make_scored: Maker) -> None:
    table = completion_table([make_scored("a", [[0.5]], extras={"r/completion": ("mine",)})], ["r"], step=1)
    assert table["completion"].to_pylist() == ["a"]
    assert table["extra/completion"].to_pylist() == ["mine"]


def test_text_that_utf8_cannot_hold_is_escaped(make_scored: Maker) -> None:
    group = make_scored(["a\ud800b"], [[0.0]], prompt="\udcff", extras={"r/note": ("\ud801",)})
    table = completion_table([group], ["r"], step=1)
    assert table["completion"].to_pylist() == ["a\\ud800b"]
    assert table["prompt"].to_pylist() == ["\\udcff"]
    assert table["note"].to_pylist() == ["\\ud801"]


def test_the_same_completions_give_the_same_bytes(tmp_path: Path, make_scored: Maker) -> None:
    rollouts = Rollouts(scored=[make_scored("ab", [[0.0], [1.0]])], advantages=[torch.tensor([-1.0, 1.0])])
    for folder in ("one", "two"):
        CompletionFiles(tmp_path / folder, ["r"]).write_training(3, rollouts)
    name = Path("completions") / "train-000003.parquet"
    assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_files_of_later_steps_and_unfinished_ones_are_dropped_and_nothing_else(tmp_path: Path) -> None:
    names = {
        "completions": ["train-000009.parquet", "train-000010.parquet", "train-1000000.parquet", "notes.txt"],
        "eval": [
            *("000000.parquet", "000010.parquet", "000020.parquet", ".writing-000010.parquet"),
            *("aime-2024-000000.parquet", "aime-2024-000010.parquet"),
        ],
    }
    for folder, files in names.items():
        (tmp_path / folder).mkdir()
        for name in files:
            (tmp_path / folder / name).touch()
    CompletionFiles(tmp_path, ["r"]).drop_after(train_step=10, eval_step=9)
    left = {folder: sorted(path.name for path in (tmp_path / folder).iterdir()) for folder in names}
    assert left == {
        "completions": ["notes.txt", "train-000009.parquet", "train-000010.parquet"],
        "eval": ["000000.parquet", "aime-2024-000000.parquet"],
    }


def test_integers_beyond_the_exact_ones_of_a_float_stand_beside_floats(make_scored: Maker) -> None:
    big = 2**60 + 1
    group = make_scored("abc", [[0.0]] * 3, extras={"r/value": (big, 0.5, None)})
    assert completion_table([group], ["r"], step=1)["value"].to_pylist() == [float(big), 0.5, None]
