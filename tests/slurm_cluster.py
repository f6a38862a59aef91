"""A real Slurm on this machine: five pseudo-nodes, which are this machine under other names, and a partition that preempts.

What they call GPUs are two device files that are everywhere, so that jobs ask for GPUs and get told theirs as on a cluster.
"""

import getpass
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from vllm_server import free_port

ROOT = Path(__file__).parents[1]
NODES = 5
DAEMONS = ("slurmctld", "slurmd")
PROGRAMS = (*DAEMONS, "sbatch", "srun", "scontrol")
START_SECONDS = 30

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
# Requeued jobs wait until the credentials of their last life have expired.
AuthInfo=cred_expire=5
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmdParameters=config_overrides
KillWait=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=usual Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=2 PreemptMode=OFF
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job that was submitted.

    Attributes:
        number: Slurm's.
        output: File that it prints to.
        environment: In which Slurm's commands find the cluster.
    """

    number: str
    output: Path
    environment: dict[str, str]

    def shown(self, key: str) -> str:
        """Give what Slurm says of the job."""
        told = self.ask("scontrol", "show", "job", self.number)
        found = re.search(rf"\b{key}=(\S*)", told)
        assert found is not None, told
        return found[1]

    def ask(self, *command: str) -> str:
        """Run one of Slurm's commands."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True, timeout=60)
        return done.stdout

    def printed(self) -> str:
        """Give what it has printed so far."""
        return self.output.read_text() if self.output.exists() else ""

    def wait(self, seconds: float = 300) -> tuple[str, int]:
        """Wait for its end; give its state and exit code."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        deadline = time.monotonic() + seconds
        while (state := self.shown("JobState")) not in ended:
            assert time.monotonic() < deadline, (state, self.printed())
            time.sleep(0.5)
        return state, int(self.shown("ExitCode").partition(":")[0])


class Cluster:
    """A running Slurm.

    Args:
        environment: In which its commands find it.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment

    def submit(self, script: str, *arguments: str, folder: Path, options: tuple[str, ...] = (), **more: str) -> Job:
        """Submit one of the product's scripts.

        Args:
            script: Its name in scripts/slurm.
            *arguments: For it.
            folder: Where the job works and its output goes.
            options: Of sbatch.
            **more: Environment variables.
        """
        ours = {"GRPO_ROOT": str(ROOT), "GRPO_SETUP": os.devnull, "GRPO_COMMAND": f"{sys.executable} -m grpo_cli"}
        path = str(ROOT / "scripts/slurm" / script)
        return self.sbatch(*options, "--gpus-per-node=2", path, *arguments, folder=folder, **ours, **more)

    def sbatch(self, *arguments: str, folder: Path, **more: str) -> Job:
        """Submit anything."""
        done = subprocess.run(
            ["sbatch", "--parsable", f"--chdir={folder}", f"--output={folder}/job-%j.out", *arguments],
            env=self.environment | more,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        number = done.stdout.strip()
        return Job(number=number, output=folder / f"job-{number}.out", environment=self.environment)

    def is_ready(self) -> bool:
        """Tell whether all nodes wait for work."""
        told = subprocess.run(
            ["sinfo", "--noheader", "--partition=usual", "--format=%D %t"],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return told.stdout.split() == [str(NODES), "idle"]


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[Cluster]:
    """Start Slurm, and end it with all of its jobs. Where that is not possible, the test is skipped.

    Args:
        folder: For its files.
    """
    missing = [name for name in PROGRAMS if _program(name) is None]
    if missing:
        pytest.skip(f"Slurm is not installed: there is no {', '.join(missing)}")
    cluster = Cluster({**os.environ, "SLURM_CONF": str(_configure(folder)), "OMP_NUM_THREADS": "1"})
    commands = [["slurmctld", "-D", "-c"], *(["slurmd", "-D", "-N", f"n{number}"] for number in range(1, NODES + 1))]
    daemons: list[subprocess.Popen[bytes]] = []
    with (folder / "daemons.log").open("wb") as log:
        for name, *options in commands:
            daemons.append(
                subprocess.Popen(
                    [_program(name) or name, *options], env=cluster.environment, stdout=log, stderr=subprocess.STDOUT
                )
            )
    try:
        _wait_until_ready(cluster, daemons, folder)
        yield cluster
        subprocess.run(["scancel", f"--user={getpass.getuser()}"], env=cluster.environment, check=False)
        _wait_for_idle(cluster)
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(30)


def _program(name: str) -> str | None:
    """Find a program, also where only an administrator's path leads."""
    return shutil.which(name, path=os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/usr/local/sbin"]))


def _configure(folder: Path) -> Path:
    """Write the cluster's configuration."""
    for number in range(1, NODES + 1):
        (folder / "spool" / f"n{number}").mkdir(parents=True)
    (folder / "state").mkdir()
    host = socket.gethostname().partition(".")[0]
    node = f"NodeHostname={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=1000 Gres=gpu:2 State=UNKNOWN"
    nodes = "\n".join(f"NodeName=n{number} Port={free_port()} {node}" for number in range(1, NODES + 1))
    text = CONFIGURATION.format(
        host=host,
        port=free_port(),
        user=getpass.getuser(),
        folder=folder,
        nodes=nodes,
    )
    (folder / "slurm.conf").write_text(text)
    (folder / "gres.conf").write_text("Name=gpu Count=2 File=/dev/null,/dev/zero\n")
    return folder / "slurm.conf"


def _wait_until_ready(cluster: Cluster, daemons: list[subprocess.Popen[bytes]], folder: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not cluster.is_ready():
        if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in daemons):
            last = (folder / "daemons.log").read_text(errors="replace").splitlines()[-3:]
            pytest.skip(f"Slurm does not start here: {'; '.join(last)}")
        time.sleep(0.2)


def _wait_for_idle(cluster: Cluster) -> None:
    deadline = time.monotonic() + 60
    while not cluster.is_ready() and time.monotonic() < deadline:
        time.sleep(0.5)
