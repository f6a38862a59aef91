"""A small experiment whose prompts have images, and what its runs leave behind."""

import json
from pathlib import Path
from typing import Any

from e2e.experiment import Experiment, make_experiment, records
from vision_prompts import PICTURES

ROWS = (
    {"prompt": "What are they?", "images": ["0.png", "1.png"]},
    {"prompt": "What is it?", "images": ["2.png"]},
    {"prompt": "What?", "images": []},
)

_REWARD = """

def varied(completion_ids, **_):
    return [sum(ids) % 17 / 17 for ids in completion_ids]
"""


def make_image_experiment(folder: Path, model: Path) -> Experiment:
    """Write an experiment of rows with two images, one and none, which evaluates greedily if it is asked to."""
    made = make_experiment(
        folder,
        model,
        dataset={"name": "rows/data.jsonl", "conversational": True},
        rewards={"reward_funcs": ["my_rewards.varied"]},
    )
    with (folder / "my_rewards.py").open("a") as file:
        file.write(_REWARD)
    (folder / "rows").mkdir()
    for number, image in enumerate(PICTURES):
        (folder / "rows" / f"{number}.png").write_bytes(image)
    (folder / "rows" / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return made


def steps(output: Path) -> list[dict[str, Any]]:
    """Read the metrics of training steps."""
    return [record for record in records(output) if "loss" in record]


def assert_sampled_as_trained(output: Path, count: int) -> None:
    """What vLLM sampled is what the trainer would have, in every step: the same model in float32, where another order of sums is all that differs."""
    found = steps(output)
    assert [one["step"] for one in found] == list(range(1, count + 1))
    assert found[0]["grad_norm"] > 0.0
    # A step without a gradient needs no log-probabilities.
    differences = [one["sampling/logp_difference/max"] for one in found if "sampling/logp_difference/max" in one]
    assert differences
    assert max(differences) < 1e-4
    assert max(one["canary/logp_difference/max"] for one in found) < 1e-4
