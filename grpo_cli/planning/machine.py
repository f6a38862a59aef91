"""The processes that a plan is for, and how fast each of them is taken to be."""

import math
from dataclasses import dataclass

import torch

from grpo_cli.device_memory import total_memory
from grpo_cli.errors import GrpoError


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """What a process reaches of its device, which is less than a data sheet says.

    Attributes:
        operations: Floating-point operations a second in large matrix products.
        memory_bytes: Bytes a second that are read from its memory.
        link_bytes: Bytes a second that it exchanges with the other processes.
    """

    operations: float
    memory_bytes: float
    link_bytes: float


SPEEDS = {
    "cuda": Speed(operations=400e12, memory_bytes=2.4e12, link_bytes=50e9),
    "cpu": Speed(operations=50e9, memory_bytes=6e9, link_bytes=2e9),
}
"""Of an H100 in bfloat16 (40 % of its peak, 70 % of its bandwidth, a network card of 400 Gbit/s each); of a core of the machines that this
project is tested on. They decide shares of a step, not how long it really takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Where a run is to train.

    Attributes:
        device: Of each process.
        processes: How many train together.
        memory: Bytes of each process; None: not known.
        speed: Of each process.
    """

    device: torch.device
    processes: int
    memory: int | None
    speed: Speed


def planned_machine(
    *, gpus: int | None, gpu_memory: float | None, tflops: float | None = None, bandwidth: float | None = None
) -> Machine:
    """Describe the machine that a person asks about, or else this one.

    Args:
        gpus: GPUs that train, one process each; None: those of this machine, or a process on its CPU.
        gpu_memory: GB (1e9 bytes) of each, as data sheets count; None: as this machine's have.
        tflops: What each reaches, in 1e12 operations a second.
        bandwidth: What each reads from its memory, in 1e12 bytes a second.

    Raises:
        GrpoError: If the memory of a GPU is not known, or a number is none.
    """
    for option, value in {"--gpu-memory": gpu_memory, "--gpu-tflops": tflops, "--gpu-bandwidth": bandwidth}.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise GrpoError(f"{option}: found {value}; allowed: a number above 0")
    has_gpu = torch.cuda.is_available()
    if gpus is None and gpu_memory is None and not has_gpu:
        device = torch.device("cpu")
        return Machine(device=device, processes=1, memory=total_memory(device), speed=SPEEDS["cpu"])
    device = torch.device("cuda")
    if gpu_memory is None and not has_gpu:
        raise GrpoError("--gpus: this machine has no GPU whose memory could be read", hint="add --gpu-memory, in GB")
    usual = SPEEDS["cuda"]
    return Machine(
        device=device,
        processes=gpus or (torch.cuda.device_count() if has_gpu else 1),
        memory=total_memory(device) if gpu_memory is None else int(gpu_memory * 1e9),
        speed=Speed(
            operations=usual.operations if tflops is None else tflops * 1e12,
            memory_bytes=usual.memory_bytes if bandwidth is None else bandwidth * 1e12,
            link_bytes=usual.link_bytes,
        ),
    )
