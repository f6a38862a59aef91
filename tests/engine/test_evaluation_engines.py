"""`grpo eval` on an engine with a copy of the weights: the same numbers, and a copy of other weights is found out."""

from pathlib import Path

import pytest
from e2e.experiment import Experiment, make_experiment
from engine.copying_engine import CopyingEngine, Lie, NamedWeights, truth

from grpo_cli.engine.evaluate import evaluate
from grpo_cli.engine.evaluated_model import evaluated_models
from grpo_cli.engine.inputs import SamplingInputs
from grpo_cli.engine.rollouts import Told
from grpo_cli.errors import TrainingError
from grpo_cli.policy.forward import PolicyModel
from grpo_cli.recipe.load import load_recipe
from grpo_cli.types import PolicyVersion


@pytest.fixture
def experiment(tiny_model_folder: Path, tmp_path: Path) -> Experiment:
    return make_experiment(
        tmp_path,
        tiny_model_folder,
        rewards={"reward_funcs": ["my_rewards.few_letters"]},
        eval={"dataset": {"name": "data.jsonl"}, "temperature": 0.8, "num_generations": 3},
    )


def evaluated(experiment: Experiment, output: str, lie: Lie | None = None) -> bytes:
    """Evaluate with the local engine, or with a copying one and what it takes for the weights; give eval.json."""

    def copying(inputs: SamplingInputs, policy: PolicyModel, told: Told) -> CopyingEngine:
        assert lie is not None
        return CopyingEngine(policy.model, inputs.tokenizer, lie=lie, max_num_seqs=64)

    folder = experiment.output(output)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("grpo_cli.engine.vllm_rollouts.open_colocated", copying)
        loaded = load_recipe(experiment.recipe, [] if lie is None else ["vllm.mode=colocate"])
        evaluate(loaded, evaluated_models([], loaded), output=folder, overwrite=False)
    (found,) = folder.glob("*/eval.json")
    return found.read_bytes()


def noisy(weights: NamedWeights, version: PolicyVersion) -> NamedWeights:
    """Take weights that are off by a little."""
    return [(name, tensor + 0.05) for name, tensor in weights]


def test_an_engine_with_a_copy_gives_the_same_bytes(experiment: Experiment) -> None:
    assert evaluated(experiment, "copy", truth) == evaluated(experiment, "local")


def test_an_engine_with_other_weights_evaluates_nothing(experiment: Experiment) -> None:
    with pytest.raises(TrainingError, match="does not sample from the trained weights"):
        evaluated(experiment, "copy", noisy)
    assert not list(experiment.output("copy").glob("*/*/part-*"))
