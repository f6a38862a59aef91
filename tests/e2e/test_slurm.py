"""The batch scripts on a real Slurm with pseudo-nodes: they train, fail, are preempted, and go on, as on a cluster."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.experiment import Experiment, assert_same_run, records
from e2e.slurm_jobs import make, saved_steps, wait_for_steps
from many_processes import assert_close
from slurm_cluster import Cluster, Job, slurm_cluster

from grpo_cli.engine.run import run
from grpo_cli.recipe.load import load_recipe

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

STEPS = 30


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Experiment:
    stateful = ("my_rewards.noisy", "my_rewards.Counting")
    return make(tmp_path_factory.mktemp("experiment"), tiny_model_folder, STEPS, *stateful)


def train_on_one_node(
    cluster: Cluster, experiment: Experiment, output: str, *overrides: str, node: int = 1, **environment: str
) -> Job:
    return cluster.submit(
        "one_node.sbatch",
        str(experiment.recipe),
        f"train.output_dir={experiment.output(output)}",
        *overrides,
        folder=experiment.folder,
        options=(f"--nodelist=n{node}",),
        **environment,
    )


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, experiment: Experiment) -> Job:
    """A job that nothing happens to."""
    job = train_on_one_node(cluster, experiment, "undisturbed")
    assert job.wait() == ("COMPLETED", 0), job.printed()
    return job


def test_a_node_trains_with_a_process_for_each_gpu(undisturbed: Job, experiment: Experiment) -> None:
    assert " on cpu in 2 processes" in undisturbed.printed()
    assert undisturbed.printed().rstrip().endswith("ended with exit code 0")
    run(load_recipe(experiment.recipe, [f"train.output_dir={experiment.output('alone')}"]))
    assert_close(experiment.output("undisturbed"), experiment.output("alone"))


def test_a_run_that_fails_ends_the_job_with_its_exit_code_for_good(cluster: Cluster, experiment: Experiment) -> None:
    job = train_on_one_node(cluster, experiment, "failing", FAIL_AT_STEP="2")
    assert job.wait() == ("FAILED", 3)
    assert "the judge is on holiday" in job.printed()
    assert job.printed().rstrip().endswith("ended with exit code 3")
    assert job.shown("Restarts") == "0"
    assert saved_steps(experiment.output("failing")) == ["step-000002"]


@pytest.fixture(scope="module")
def interrupted(cluster: Cluster, experiment: Experiment, undisturbed: Job) -> dict[str, Job]:
    """Jobs that lose their nodes in the middle: to another job, because their time is nearly over, and without a warning."""
    jobs = {
        name: train_on_one_node(cluster, experiment, name, node=node, SECONDS_PER_STEP="0.25")
        for node, name in enumerate(("preempted", "warned", "requeued"), start=1)
    }
    for name, job in jobs.items():
        wait_for_steps(experiment.output(name), 3, job)
    urgent = ("--partition=urgent", "--nodelist=n1", "--exclusive", "--wrap=sleep 2")
    cluster.sbatch(*urgent, folder=experiment.folder)
    # As Slurm does, `--signal` before the end of the time.
    jobs["warned"].ask("scancel", "--batch", "--signal=USR1", jobs["warned"].number)
    # As it does after a node has failed.
    jobs["requeued"].ask("scontrol", "requeue", jobs["requeued"].number)
    return jobs


@pytest.mark.parametrize(("name", "by_itself"), [("preempted", True), ("warned", True), ("requeued", False)])
def test_a_job_that_loses_its_nodes_goes_on_as_if_nothing_had_been(
    interrupted: dict[str, Job], experiment: Experiment, name: str, by_itself: bool
) -> None:
    job = interrupted[name]
    assert job.wait() == ("COMPLETED", 0), job.printed()
    assert job.shown("Restarts") == "1"
    assert job.printed().count("the job goes back into the queue") == by_itself, "else Slurm puts it there"
    steps = [record["step"] for record in records(experiment.output(name))]
    assert steps == list(range(1, STEPS + 1)), "none was done twice"
    assert_same_run(experiment.output(name), experiment.output("undisturbed"))


def test_a_job_that_is_told_to_end_saves_and_is_not_queued_again(cluster: Cluster, experiment: Experiment) -> None:
    job = train_on_one_node(cluster, experiment, "ended", SECONDS_PER_STEP="0.25")
    wait_for_steps(experiment.output("ended"), 2, job)
    job.ask("scancel", "--batch", "--signal=INT", job.number)
    assert job.wait() == ("FAILED", 143)
    assert job.shown("Restarts") == "0"
    done = records(experiment.output("ended"))[-1]["step"]
    assert saved_steps(experiment.output("ended")) == [f"step-{done:06d}"]


def test_a_job_is_not_queued_again_for_ever(cluster: Cluster, experiment: Experiment) -> None:
    job = train_on_one_node(cluster, experiment, "often", SECONDS_PER_STEP="0.25", GRPO_MAX_RESTARTS="0")
    wait_for_steps(experiment.output("often"), 2, job)
    job.ask("scancel", "--batch", "--signal=USR1", job.number)
    assert job.wait() == ("FAILED", 143)
    assert "submit it once more" in job.printed()
    shutil.rmtree(experiment.output("often"))
