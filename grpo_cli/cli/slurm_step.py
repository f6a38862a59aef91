"""What `srun` says of a task, under the names that torch and Accelerate know."""

import os
import re
import subprocess

PORTS = range(20_000, 40_000)
"""Where the processes of a step meet; which one, the numbers of job and step decide, so that two jobs on a node rarely collide."""


def join_slurm_step() -> None:
    """Become one of the processes of a Slurm step, if this is one of several tasks that `srun` started.

    Where `torchrun` or `accelerate launch` run in between, they have the say. `MASTER_ADDR` and `MASTER_PORT` count if they are set.
    """
    told = os.environ
    count = int(told.get("SLURM_STEP_NUM_TASKS", "1"))
    if count < 2 or "RANK" in told:
        return
    tasks = tasks_per_node(told["SLURM_STEP_TASKS_PER_NODE"])
    meeting = int(told["SLURM_JOB_ID"]) * 7 + int(told["SLURM_STEP_ID"])
    found = {
        "RANK": told["SLURM_PROCID"],
        "WORLD_SIZE": str(count),
        "LOCAL_RANK": told["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(tasks[int(told["SLURM_NODEID"])]),
        "MASTER_PORT": str(PORTS[meeting % len(PORTS)]),
    }
    if "MASTER_ADDR" not in told:
        found["MASTER_ADDR"] = "127.0.0.1" if len(tasks) == 1 else _first_host(told["SLURM_STEP_NODELIST"])
    for name, value in found.items():
        told.setdefault(name, value)


def tasks_per_node(text: str) -> list[int]:
    """Expand Slurm's short form: `2(x3),1` is [2, 2, 2, 1]."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, nodes in parts for _ in range(int(nodes or 1))]


def _first_host(nodes: str) -> str:
    """Name the first node of a list such as `node[03-05]`; only Slurm can expand all that it writes."""
    listed = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True)  # noqa: S603, S607
    return listed.stdout.split()[0]
