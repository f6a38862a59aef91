"""The recipe whose model learns to see: what is promised of it, in half of its steps."""

from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from e2e.experiment import records

from grpo_cli.engine.run import run
from grpo_cli.recipe.imports import resolve
from grpo_cli.recipe.load import load_recipe

RECIPE = Path(__file__).parents[2] / "recipes" / "vlm_tiny.yaml"


@pytest.mark.slow
def test_held_out_digits_are_named_far_beyond_chance(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    run(
        load_recipe(RECIPE, [f"train.output_dir={tmp_path / 'run'}", "train.max_steps=75", "eval.dataset.max_rows=200"])
    )
    before, after = (pq.read_table(tmp_path / f"run/eval/{step:06d}.parquet").to_pylist() for step in (0, 75))
    right = [sum(row["reward/digit"] > 0 for row in rows) / len(rows) for rows in (before, after)]
    # One digit in ten is right by chance, and more than one in five of 200 once in 100,000 times (binomial).
    assert right[0] < 0.2
    assert right[1] > 0.35
    assert Counter(len(row["images"]) for row in after) == {1: 200}
    assert all(
        record["sampling/logp_difference/max"] < 1e-3 for record in records(tmp_path / "run") if "reward" in record
    )


def test_a_digit_counts_whole_only_where_the_answer_ends() -> None:
    """Special tokens are not in the text: a model that goes on with them has not ended."""
    digit = resolve("vlm_tiny.digit", RECIPE.parent)
    texts, ids = ["7", "7", "7 1", "1", "", "17"], [[7, 19], [7, 17, 17], [7, 1, 19], [1, 19], [19], [1, 7, 19]]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    assert digit(completions=completions, completion_ids=ids, solution=["7"] * 6) == [1.0, 0.5, 0.5, 0.0, 0.0, 0.0]
