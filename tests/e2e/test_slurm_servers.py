"""Training on some nodes of a real Slurm and a real vLLM on another: how the two sides find each other, and what one does without the other."""

import stat
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from e2e.experiment import Experiment, records, weights
from e2e.slurm_jobs import make, saved_steps, wait_for_steps
from many_processes import overrides
from optional_packages import needs_vllm
from slurm_cluster import Cluster, Job, slurm_cluster
from tiny_models import build_tiny_model

from grpo_cli.engine.run import run
from grpo_cli.recipe.load import load_recipe

pytestmark = [pytest.mark.slow, pytest.mark.e2e, needs_vllm]

STEPS = 12
PATIENCE = 900
"""Seconds for a job: vLLM starts in half a minute on a quiet machine, and in several on a busy one."""
ACROSS: dict[str, object] = {"distributed.strategy": "deepspeed_zero3", "vllm.weight_transport": "process_group"}
"""As on several machines, although it is one."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    folder = tmp_path_factory.mktemp("experiment")
    model = build_tiny_model(folder / "model", hidden_size=128, initializer_range=0.2)
    vllm = {
        "canary_steps": 2,
        "max_model_length": 128,
        "engine": {"kv_cache_memory_bytes": 1 << 26},
    }
    return make(folder, model, STEPS, generation={"max_completion_length": 12}, vllm=vllm)


def submit(cluster: Cluster, experiment: Experiment, output: str, *more: str, **environment: str) -> Job:
    """Train on two nodes, a process on each, and serve on a third."""
    return cluster.submit(
        "many_nodes.sbatch",
        str(experiment.recipe),
        *overrides({**ACROSS, "train.output_dir": experiment.output(output)}),
        *more,
        folder=experiment.folder,
        options=("--nodes=3",),
        GRPO_TASKS="1",
        **environment,
    )


def processes_of(job: Job) -> list[psutil.Process]:
    """List all processes of a job, its batch script's among them."""
    return [process for process in psutil.process_iter() if _environment(process).get("SLURM_JOB_ID") == job.number]


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return dict(process.environ())
    except psutil.Error:
        return {}


def vllm_of(job: Job) -> psutil.Process:
    """Find the process of vLLM itself, below `grpo vllm-serve`."""
    (found,) = [one for one in processes_of(job) if "grpo_cli.rollout.vllm.served_process" in one.cmdline()]
    return found


def folder_of(job: Job, experiment: Experiment) -> Path:
    return experiment.folder / "runs" / f"slurm-{job.number}"


def assert_nothing_is_left(job: Job, experiment: Experiment, token: str) -> None:
    """No process, no token, and nothing that tells it."""
    deadline = time.monotonic() + 60
    while processes_of(job) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert processes_of(job) == []
    assert not (folder_of(job, experiment) / "token").exists()
    said = [job.output, *folder_of(job, experiment).iterdir()]
    assert not [path for path in said if token in path.read_text(errors="replace")]


@pytest.fixture(scope="module")
def requeued(cluster: Cluster, experiment: Experiment) -> tuple[Job, str]:
    """A job that has to make room in its first life, and loses its server in the second; and the token of the latter."""
    job = submit(cluster, experiment, "run", SECONDS_PER_STEP="1")
    wait_for_steps(experiment.output("run"), 2, job, PATIENCE)
    job.ask("scancel", "--batch", "--signal=USR1", job.number)
    deadline = time.monotonic() + PATIENCE
    while job.shown("Restarts") == "0":
        assert time.monotonic() < deadline, job.printed()
        time.sleep(0.5)
    wait_for_steps(experiment.output("run"), 5, job, PATIENCE)
    token = folder_of(job, experiment) / "token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    secret = token.read_text()
    assert len(secret) == 64
    assert not [process for process in processes_of(job) if secret in " ".join(process.cmdline())]
    vllm_of(job).kill()
    return job, secret


def test_a_job_that_loses_its_server_saves_and_ends(requeued: tuple[Job, str], experiment: Experiment) -> None:
    job, token = requeued
    assert job.wait(PATIENCE) == ("FAILED", 4), job.printed()
    assert job.shown("Restarts") == "1", "a failure is not queued again"
    assert "the server on n3 has ended with exit code 4; its output ends with" in job.printed()
    assert "vLLM ended by signal SIGKILL" in job.printed()
    assert job.printed().count("the servers are ready") == 2
    done = records(experiment.output("run"))[-1]["step"]
    assert f"step-{done:06d}" in saved_steps(experiment.output("run"))
    assert_nothing_is_left(job, experiment, token)


def test_the_same_command_goes_on_to_the_same_end(
    requeued: tuple[Job, str], cluster: Cluster, experiment: Experiment
) -> None:
    """As a run in one process with vLLM in it, which nothing happened to."""
    requeued[0].wait(PATIENCE)
    job = submit(cluster, experiment, "run")
    assert job.wait(PATIENCE) == ("COMPLETED", 0), job.printed()
    told = records(experiment.output("run"))
    assert [record["step"] for record in told] == list(range(1, STEPS + 1))
    assert all(record["sync/bytes"] > 0 for record in told)
    assert all(0 < record["sampling/logp_difference/mean"] < 1e-4 for record in told)
    run(load_recipe(experiment.recipe, ["vllm.mode=colocate", f"train.output_dir={experiment.output('alone')}"]))
    alone = records(experiment.output("alone"))
    assert [record["reward"] for record in told] == [record["reward"] for record in alone]
    for name, tensor in weights(experiment.output("run")).items():
        torch.testing.assert_close(tensor, weights(experiment.output("alone"))[name], atol=1e-3, rtol=0, msg=name)


def test_a_job_whose_training_fails_ends_its_server(cluster: Cluster, experiment: Experiment) -> None:
    job = submit(cluster, experiment, "failing", FAIL_AT_STEP="1")
    deadline = time.monotonic() + PATIENCE
    while "starting vLLM" not in job.printed():  # by when the token is written
        assert time.monotonic() < deadline, job.printed()
        time.sleep(0.1)
    secret = (folder_of(job, experiment) / "token").read_text()
    assert len(secret) == 64
    assert job.wait(PATIENCE) == ("FAILED", 3), job.printed()
    assert "the judge is on holiday" in job.printed()
    assert_nothing_is_left(job, experiment, secret)


def test_a_wrong_recipe_is_told_before_a_server_starts(cluster: Cluster, experiment: Experiment) -> None:
    job = submit(cluster, experiment, "wrong", "train.learning_rat=1")
    assert job.wait(PATIENCE) == ("FAILED", 2)
    assert "did you mean `learning_rate`?" in job.printed()
    assert "starting vLLM" not in job.printed()


def test_a_server_that_does_not_start_ends_the_job_with_its_words(cluster: Cluster, experiment: Experiment) -> None:
    job = submit(cluster, experiment, "unserved", GRPO_SERVER_OPTIONS="--engine max_num_seqs=none")
    assert job.wait(PATIENCE) == ("FAILED", 4), job.printed()
    assert "the server on n3 has ended with exit code 4; its output ends with" in job.printed()
    assert "training on" not in job.printed()
    assert not experiment.output("unserved").exists()
