"""`kill -9` at random moments of the real command: nothing is lost but the unfinished step."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from e2e.experiment import Experiment, assert_same_run, make_experiment

KILLS = 10


def command(experiment: Experiment, output: str, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "grpo_cli", "train", str(experiment.recipe),
        f"train.output_dir={experiment.output(output)}", "train.save_steps=1", "train.keep_checkpoints=2", *more,
    ]  # fmt: skip


@pytest.mark.slow
def test_ten_kills_at_random_moments_change_nothing(tiny_model_folder: Path, tmp_path: Path) -> None:
    """The kills are spread over the time that the process spends in its loop: start-up is long, steps are short."""
    experiment = make_experiment(
        tmp_path,
        tiny_model_folder,
        grpo={"num_generations": 2, "steps_per_generation": 2, "num_iterations": 2},
        train={
            "prompts_per_step": 2, "max_steps": 60, "learning_rate": 0.001, "micro_batch_tokens": 32,
            "output_dir": str(tmp_path / "run"),
        },
    )  # fmt: skip
    subprocess.run(command(experiment, "whole"), check=True, capture_output=True)
    moments = random.Random(0)
    output = experiment.output("killed")
    killed, done = 0, 0
    while killed < KILLS:
        process = subprocess.Popen(
            command(experiment, "killed", "--resume"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        wait_for_progress(output, done, process)
        time.sleep(moments.uniform(0.0, 0.25))
        process.kill()
        process.communicate()
        if process.returncode == 0:  # it was faster
            break
        killed += 1
        done = steps_recorded(output)
    assert killed >= KILLS // 2
    subprocess.run(command(experiment, "killed", "--resume"), check=True, capture_output=True)
    assert_same_run(output, experiment.output("whole"))


def steps_recorded(output: Path) -> int:
    metrics = output / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def wait_for_progress(output: Path, done: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until the process has trained a step of its own, or has ended."""
    deadline = time.monotonic() + 60
    while steps_recorded(output) <= done and process.poll() is None:
        assert time.monotonic() < deadline, "the run does not get anywhere"
        time.sleep(0.01)
