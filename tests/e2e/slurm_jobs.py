"""Runs that batch jobs do in the tests: slow enough to be met in the middle, and able to fail when told."""

import time
from pathlib import Path
from typing import Any

from e2e.experiment import Experiment, make_experiment, records
from slurm_cluster import Job

REWARDS = '''
"""A reward that takes its time, or fails in some step, as the environment says."""

import os
import time


def unhurried(completions, trainer_state, **_):
    time.sleep(float(os.environ.get("SECONDS_PER_STEP", "0")))
    if str(trainer_state.global_step) == os.environ.get("FAIL_AT_STEP"):
        raise ValueError("the judge is on holiday")
    return [-float(sum(letter.isalpha() for letter in text)) for text in completions]
'''


def make(folder: Path, model: Path, /, steps: int, *rewards: str, **sections: dict[str, Any]) -> Experiment:
    """Write an experiment with such a reward, and more rewards if some are named."""
    experiment = make_experiment(
        folder,
        model,
        rewards={"reward_funcs": ["unhurried.unhurried", *rewards]},
        train={"max_steps": steps, "learning_rate": 0.001},
        **sections,
    )
    (folder / "unhurried.py").write_text(REWARDS)
    return experiment


def wait_for_steps(output: Path, steps: int, job: Job, seconds: float = 300) -> None:
    """Wait until a job's run has done some steps."""
    deadline = time.monotonic() + seconds
    while not (output / "metrics.jsonl").exists() or len(records(output)) < steps:
        assert time.monotonic() < deadline, job.printed()
        assert job.shown("JobState") in {"PENDING", "RUNNING", "COMPLETING"}, job.printed()
        time.sleep(0.1)


def saved_steps(output: Path) -> list[str]:
    """List a run's checkpoints."""
    return sorted(path.name for path in (output / "checkpoints").iterdir())
