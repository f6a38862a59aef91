"""Runs in several real processes."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from e2e.experiment import Experiment, completions, records, weights
from vllm_server import free_port
from warm_start import GRPO, LAUNCH, RANK_NAME, WarmCommand, WarmStart

PROGRAM = """
import json, os, sys
from pathlib import Path
from typing import Any
from grpo_cli.engine.run import run
from grpo_cli.recipe.load import load_recipe
for recipe, overrides, resume in json.loads(sys.argv[1]):
    run(load_recipe(Path(recipe), [one.replace("{rank}", os.environ["RANK"]) for one in overrides]), resume=resume)
"""

SPREAD = (
    "processes/",
    "memory/",
    "tokens/computed",
    "tokens/useful",
    "tokens_per_second",
    "time/",
    "step_time",
    "eval/time/",
    "eval/letters/time/",
    "eval/all/time/",
)
"""Metrics that depend on how the work is spread, or on a clock."""

SMALL: dict[str, Any] = {
    "grpo": {"num_generations": 3},
    "generation": {"max_completion_length": 10},
    "train": {"prompts_per_step": 3, "max_steps": 5, "learning_rate": 0.001},
}
"""Sections of an experiment whose groups do not divide evenly among two processes."""

Job = tuple[Path, Mapping[str, object], str | None]
"""Recipe, changes, and what `--resume` says."""


def overrides(changes: Mapping[str, object]) -> list[str]:
    return [f"{key}={json.dumps(value) if isinstance(value, bool) else value}" for key, value in changes.items()]


def start_forked(
    warm: WarmStart, count: int, *arguments: object, program: str = GRPO, num_spares: int = 0
) -> list[WarmCommand]:
    """Start a command in processes that are told of each other as torchrun tells them.

    Args:
        warm: Forks them.
        count: Number of processes.
        arguments: The command line of each.
        program: What is run with them, if not `grpo`.
        num_spares: Of each; see `WarmStart.start`.
    """
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    size = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    return [
        warm.start(
            *arguments,
            environment={**os.environ, **address, **size, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            program=program,
            num_spares=num_spares,
        )
        for rank in range(count)
    ]


def run_forked(
    warm: WarmStart, count: int, *arguments: object, program: str = GRPO, timeout: float = 300
) -> tuple[list[int | None], str, str]:
    """Run a command in forked processes, each of which ends by itself.

    Returns:
        The exit code of each, and what all of them have written to their outputs and to their errors. See `start_forked`.
    """
    processes = start_forked(warm, count, *arguments, program=program)
    told = [process.communicate(timeout) for process in processes]
    outputs, errors = ("".join(words) for words in zip(*told, strict=True))
    return [process.returncode for process in processes], outputs, errors


def train_in_forked(
    warm: WarmStart, count: int, jobs: Sequence[Job], *, before: str = "", afterwards: str = ""
) -> None:
    """Do some runs one after another in the same processes, and then something else; all of it succeeds.

    Args:
        warm: Forks the processes; see `start_forked`.
        count: Number of processes.
        jobs: `{rank}` in a change is the process's number.
        before: What is done before all runs.
        afterwards: What is done after them.
    """
    told = json.dumps([(str(recipe), overrides(changes), resume) for recipe, changes, resume in jobs])
    processes = start_forked(warm, count, told, program=before + PROGRAM + afterwards)
    deadline = time.monotonic() + 1500
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes) or time.monotonic() > deadline:
            for process in processes:  # the others would wait for the one that has failed
                process.kill()
        time.sleep(0.1)
    assert [process.returncode for process in processes] == [0] * count, [
        process.communicate(timeout=10) for process in processes
    ]


def assert_close(mine: Path, theirs: Path, *, but: tuple[str, ...] = (), atol: float = 2e-5) -> None:
    """The same run, up to the order in which sums were made.

    Args:
        mine: A run directory.
        theirs: Another.
        but: Beginnings of metrics that are left out.
        atol: By how much weights may differ.
    """
    for record, other in zip(records(mine), records(theirs), strict=True):
        assert record.keys() - {"processes/imbalance"} == other.keys()
        for name, value in record.items():
            if not name.startswith((*SPREAD, *but)):
                expected = None if other[name] is None else pytest.approx(other[name], rel=1e-4, abs=5e-5)
                assert value == expected, (name, record["step"])
    my_weights, their_weights = weights(mine), weights(theirs)
    for name, value in my_weights.items():
        torch.testing.assert_close(value, their_weights[name], rtol=1e-4, atol=atol, msg=name)
    texts = [[[row["completion"] for row in rows] for rows in completions(one).values()] for one in (mine, theirs)]
    assert texts[0] == texts[1]


class Launched:
    """A running `grpo train --nproc`.

    Args:
        experiment: What is run.
        output: Name of its run directory.
        *arguments: More of the command line.
        count: Number of processes.
        warm: Forks all of them, if they are not to start from scratch.
    """

    def __init__(
        self, experiment: Experiment, output: str, *arguments: str, count: int = 2, warm: WarmStart | None = None
    ) -> None:
        self.output = experiment.output(output)
        self.is_forked = warm is not None
        command = (
            "train",
            str(experiment.recipe),
            "--nproc",
            str(count),
            f"train.output_dir={self.output}",
            *arguments,
        )
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process: WarmCommand | subprocess.Popen[str]
        if warm is not None:
            self.process = warm.start(*command, environment=environment, program=LAUNCH, num_spares=count)
            return
        self.process = subprocess.Popen(
            [sys.executable, "-m", "grpo_cli", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def wait_for_steps(self, steps: int) -> None:
        deadline = time.monotonic() + 400
        while not (self.output / "metrics.jsonl").exists() or len(records(self.output)) < steps:
            assert self.process.poll() is None, self.process.communicate(timeout=10)
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def workers(self) -> dict[int, psutil.Process]:
        """By rank."""
        children = psutil.Process(self.process.pid).children()
        if self.is_forked:
            return {int(child.name().removeprefix(RANK_NAME)): child for child in children}
        return {int(child.environ()["RANK"]): child for child in children}

    def end_by_killing(self, rank: int, *, seconds: float) -> None:
        """Kill one of the processes: the others end within some seconds, and it is said in a line what happened."""
        workers = self.workers()
        workers[rank].kill()
        began = time.monotonic()
        code, output, errors = self.end()
        assert time.monotonic() - began < seconds
        assert code == 137, (output, errors)
        assert not any(worker.is_running() for worker in workers.values())
        assert "Traceback" not in errors
        assert f"process {rank} was killed by SIGKILL" in errors

    def end(self) -> tuple[int, str, str]:
        output, errors = self.process.communicate(timeout=120)
        code = self.process.returncode
        assert code is not None
        return code, output, errors
