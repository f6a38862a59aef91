"""`kill -9` at random moments of the real command: nothing is lost but the unfinished step."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from e2e.experiment import Experiment, assert_same_run, make_experiment
from warm_start import WarmCommand, WarmStart

KILLS = 10
GRPO = [sys.executable, "-m", "grpo_cli"]


def arguments(experiment: Experiment, output: str, *more: str) -> list[str]:
    return [
        "train", str(experiment.recipe),
        f"train.output_dir={experiment.output(output)}", "train.save_steps=1", "train.keep_checkpoints=2", *more,
    ]  # fmt: skip


@pytest.mark.slow
def test_ten_kills_at_random_moments_change_nothing(tiny_model_folder: Path, tmp_path: Path, warm: WarmStart) -> None:
    """The kills are spread over the time that the process spends in its loop.

    Those that are killed are forked, for their start-up would be long; the run that they are compared with, and the one that ends theirs,
    start from scratch, each with other hashes.
    """
    experiment = make_experiment(
        tmp_path,
        tiny_model_folder,
        grpo={"num_generations": 2, "steps_per_generation": 2, "num_iterations": 2},
        train={
            "prompts_per_step": 2, "max_steps": 60, "learning_rate": 0.001, "micro_batch_tokens": 32,
            "gradient_checkpointing": False, "output_dir": str(tmp_path / "run"),
        },
    )  # fmt: skip
    subprocess.run([*GRPO, *arguments(experiment, "whole")], check=True, capture_output=True)
    moments = random.Random(0)
    output = experiment.output("killed")
    killed, done = 0, 0
    while killed < KILLS:
        process = warm.start(*arguments(experiment, "killed", "--resume"))
        wait_for_progress(output, done, process)
        time.sleep(moments.uniform(0.0, 0.25))
        process.kill()
        process.wait(60)
        if process.returncode == 0:  # it was faster
            break
        killed += 1
        done = steps_recorded(output)
    assert killed >= KILLS // 2
    subprocess.run([*GRPO, *arguments(experiment, "killed", "--resume")], check=True, capture_output=True)
    assert_same_run(output, experiment.output("whole"))


def steps_recorded(output: Path) -> int:
    metrics = output / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def wait_for_progress(output: Path, done: int, process: WarmCommand) -> None:
    """Wait until the process has trained a step of its own, or has ended."""
    deadline = time.monotonic() + 60
    while steps_recorded(output) <= done and process.poll() is None:
        assert time.monotonic() < deadline, "the run does not get anywhere"
        time.sleep(0.01)
