"""Runs whose prompts have images, with vLLM."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e.experiment import Experiment, make_experiment
from optional_packages import needs_vllm
from vision_prompts import PICTURES

from grpo_cli.engine.run import run
from grpo_cli.errors import TrainingError
from grpo_cli.recipe.load import load_recipe

pytestmark = [pytest.mark.slow, needs_vllm]


@pytest.fixture
def experiment(vision_folder: Callable[[str], Path], tmp_path: Path) -> Experiment:
    """Rows with two images, one and none."""
    made = make_experiment(
        tmp_path,
        vision_folder("qwen2_5_vl"),
        dataset={"name": "rows/data.jsonl", "conversational": True},
        rewards={"reward_funcs": ["my_rewards.varied"]},
    )
    with (tmp_path / "my_rewards.py").open("a") as file:
        file.write("\n\ndef varied(completion_ids, **_):\n    return [len(set(ids)) / 6 for ids in completion_ids]\n")
    (tmp_path / "rows").mkdir()
    for number, image in enumerate(PICTURES):
        (tmp_path / "rows" / f"{number}.png").write_bytes(image)
    rows = [
        {"prompt": "What are they?", "images": ["0.png", "1.png"]},
        {"prompt": "What is it?", "images": ["2.png"]},
        {"prompt": "What?", "images": []},
    ]
    (tmp_path / "rows" / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


def test_servers_are_refused_before_anything_is_waited_for(experiment: Experiment) -> None:
    with pytest.raises(TrainingError, match=r"vllm\.mode: found server, but prompts of this run have images"):
        run(load_recipe(experiment.recipe, ["vllm.mode=server"]))


def test_vllm_in_the_training_process_samples_what_the_trainer_would_have(experiment: Experiment) -> None:
    settings = [
        "vllm.mode=colocate",
        "train.max_steps=3",
        "vllm.canary_steps=1",
        "model.lora.r=4",
        "train.learning_rate=0.01",
    ]
    run(load_recipe(experiment.recipe, settings))
    lines = (experiment.output() / "metrics.jsonl").read_text().splitlines()
    steps = [one for one in map(json.loads, lines) if "loss" in one]
    assert [one["step"] for one in steps] == [1, 2, 3]
    assert steps[0]["grad_norm"] > 0.0
    # The same model in float32: another order of sums is all that differs. A step without a gradient needs no log-probabilities.
    assert steps[0]["sampling/logp_difference/max"] < 1e-4
    assert max(one["canary/logp_difference/max"] for one in steps) < 1e-4
