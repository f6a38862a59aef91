"""The recipe of generated tasks from beginning to end, with a tiny model that knows nothing."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from e2e.experiment import records
from optional_packages import needs_reasoning_gym
from warm_start import WarmStart

RECIPE = Path(__file__).parents[2] / "recipes" / "reasoning.yaml"

pytestmark = [pytest.mark.e2e, needs_reasoning_gym]


def test_it_trains_on_questions_and_evaluates_on_others(
    tiny_model_folder: Path, tmp_path: Path, warm: WarmStart
) -> None:
    outcome = warm.run(
        *("train", RECIPE, f"model.name_or_path={tiny_model_folder}", f"train.output_dir={tmp_path / 'run'}"),
        *("train.max_steps=2", "train.prompts_per_step=2", "generation.max_completion_length=4"),
        *("dataset.arguments.size=8", "eval.dataset.arguments.size=4"),
    )
    assert outcome.returncode == 0, outcome.stderr
    evaluations = [record for record in records(tmp_path / "run") if "eval/reward/correct/mean" in record]
    assert [record["step"] for record in evaluations] == [0, 2]
    trained = {
        row["prompt"]
        for file in sorted((tmp_path / "run/completions").iterdir())
        for row in pq.read_table(file).to_pylist()
    }
    held_out = pq.read_table(tmp_path / "run/eval/000000.parquet").to_pylist()
    assert len(held_out) == 4
    assert len(trained) == 4
    assert trained.isdisjoint(row["prompt"] for row in held_out)
    assert all("answer" in row for row in held_out)
