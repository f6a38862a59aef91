"""What scripts/bench/adapters tells, on a model whose weights are large beside everything else."""

import os
import sys
from pathlib import Path

import pytest
from e2e.experiment import make_experiment
from tiny_models import build_tiny_model

from bench.adapter_memory import COLUMNS, WAYS, measured

ROOT = Path(__file__).parents[2]
MIB = 2**20


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured as Linux tells it")
def test_weights_are_told_from_what_a_step_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_tiny_model(tmp_path / "model", hidden_size=768, num_layers=6, intermediate_size=2304)
    file = (model / "model.safetensors").stat().st_size
    assert file > 150 * MIB
    experiment = make_experiment(
        tmp_path / "run", model, rewards={"reward_funcs": ["my_rewards.few_letters"]}, train={"max_steps": 2}
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "scripts")]))
    found = measured(experiment.recipe, WAYS["adapters on 4 bits"], steps=2)
    assert found.keys() == {*COLUMNS, "seconds"}
    # An eighth of the layers, the adapters, and nothing of the file that they were rounded from, which is there while they are.
    assert 0.1 * file < found["weights"] < 0.4 * file
    assert found["loading"] > file
    assert 0 < found["checkpoint"] < 0.4 * file, "of adapters alone"
