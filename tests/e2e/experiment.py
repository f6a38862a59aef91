"""A small experiment folder, as a user would keep it: recipe, data, rewards; and what a run leaves behind."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
import yaml
from safetensors.torch import load_file

WORDS = ("red", "green", "blue", "one", "two", "three", "cat", "dog", "sun", "moon", "sea", "hill")

REWARDS = '''
"""Rewards of the experiment; one of them uses the global generators, which a resumed run must restore."""

import os
import random
import signal


def few_letters(completions, **_):
    return [-float(sum(letter.isalpha() for letter in text)) for text in completions]


def noisy(completions, trainer_state, **_):
    import numpy as np
    import torch

    if str(trainer_state.global_step) == os.environ.get("STOP_WHILE_SCORING"):
        os.environ.pop("STOP_WHILE_SCORING")
        os.kill(os.getpid(), signal.SIGTERM)
    return [random.random() + np.random.rand() + torch.rand(1).item() for _ in completions]


class Counting:
    """Its reward depends on how often it was called before."""

    def __init__(self):
        self.calls = 0

    def __call__(self, completions, **_):
        self.calls += 1
        return [0.01 * self.calls * (index % 2) for index, _ in enumerate(completions)]

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


def early(completions, log_extra, log_metric, **_):
    """1 for completions whose first letter, which is the answer, is an early one."""
    answers = [text[:1].lower() or None for text in completions]
    log_extra("answer", answers)
    log_metric("answered", sum(answer is not None for answer in answers) / len(answers))
    return [float(answer is not None and answer < "m") for answer in answers]


def first_letter(text):
    return text[:1].lower() or None
'''


@dataclass(frozen=True)
class Experiment:
    """A folder with `recipe.yaml`, `data.jsonl` and `my_rewards.py`."""

    folder: Path

    @property
    def recipe(self) -> Path:
        return self.folder / "recipe.yaml"

    def output(self, name: str = "run") -> Path:
        return self.folder / name


def make_experiment(folder: Path, model: Path, /, **sections: dict[str, Any]) -> Experiment:
    """Write an experiment of a few seconds; `sections` change its recipe."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": f"{word} ", "number": index} for index, word in enumerate(WORDS)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "my_rewards.py").write_text(REWARDS)
    recipe: dict[str, Any] = {
        "model": {"name_or_path": str(model)},
        "dataset": {"name": "data.jsonl"},
        "rewards": {"reward_funcs": ["my_rewards.few_letters", "my_rewards.noisy", "my_rewards.Counting"]},
        "grpo": {"num_generations": 2},
        "generation": {"max_completion_length": 6},
        "train": {
            "prompts_per_step": 2,
            "max_steps": 6,
            "learning_rate": 0.01,
            "micro_batch_tokens": 32,
            "save_steps": 0,
            "output_dir": str(folder / "run"),
        },
        "logging": {"print_completions_steps": 0},
    }
    for name, values in sections.items():
        recipe.setdefault(name, {}).update(values)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return Experiment(folder)


def records(output: Path) -> list[dict[str, Any]]:
    """Read metrics.jsonl."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def timeless(output: Path) -> list[dict[str, Any]]:
    """Read metrics.jsonl without what a clock and the kernel say."""
    clocks = ("time/", "memory/", "processes/imbalance", "step_time", "tokens_per_second")
    return [
        {name: value for name, value in record.items() if not name.startswith(clocks) and "/time/" not in name}
        for record in records(output)
    ]


def completions(output: Path) -> dict[str, list[dict[str, Any]]]:
    """Read every completions file."""
    files = sorted([*output.glob("completions/*.parquet"), *output.glob("eval/*.parquet")])
    return {str(file.relative_to(output)): pq.read_table(file).to_pylist() for file in files}


def weights(output: Path) -> dict[str, torch.Tensor]:
    """Read the final model's weights, or its adapters where only they were trained."""
    (file,) = (output / "final").glob("*model.safetensors")
    tensors: dict[str, torch.Tensor] = load_file(file)
    return tensors


def assert_same_run(mine: Path, theirs: Path) -> None:
    """Compare two runs bit for bit: weights, metrics, completions."""
    assert repr(timeless(mine)) == repr(timeless(theirs))
    assert repr(completions(mine)) == repr(completions(theirs))
    my_weights, their_weights = weights(mine), weights(theirs)
    assert my_weights.keys() == their_weights.keys()
    assert all(torch.equal(value, their_weights[name]) for name, value in my_weights.items())
