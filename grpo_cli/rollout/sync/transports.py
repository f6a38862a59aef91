"""How buckets get from the trainer to the processes of the servers: three ways with one shape, and the choice between them.

A transport carries bytes only. What a server must know to take them are small JSON objects, which the caller brings to it by
`request` functions (over HTTP, or in a test by a queue).
"""

import os
from collections.abc import Callable
from typing import Any, Literal, Protocol, assert_never

import torch

from grpo_cli.errors import TrainingError
from grpo_cli.rollout.sync.buckets import Bucket
from grpo_cli.rollout.sync.cuda_ipc import CudaIpcSource, CudaIpcTransport
from grpo_cli.rollout.sync.process_group import (
    PATIENCE_SECONDS,
    ProcessGroupSource,
    ProcessGroupTransport,
    address_towards,
)
from grpo_cli.rollout.sync.shared_memory import SharedMemorySource, SharedMemoryTransport

__all__ = [
    "BucketSource",
    "CudaIpcTransport",
    "ProcessGroupTransport",
    "SharedMemoryTransport",
    "TransportName",
    "WeightTransport",
    "address_towards",
    "build_source",
    "build_transport",
    "choose_transport",
]

TransportName = Literal["process_group", "shared_memory", "cuda_ipc"]


class WeightTransport(Protocol):
    """The trainer's end.

    `request` functions are called once, in the caller's thread, and return when every server has answered; what they raise is
    raised by the method. After any error the transport is no longer open, and `open` starts afresh.
    """

    @property
    def is_open(self) -> bool:
        """Whether buckets can be sent."""
        ...

    def init_info(self, *, rank_offset: int, world_size: int) -> dict[str, Any]:
        """Give what one server must know to connect; to be asked for inside the `request` of `open`.

        Args:
            rank_offset: 1 plus the processes of the servers before it.
            world_size: 1 plus the processes of all servers.
        """
        ...

    def open(self, *, world_size: int, request: Callable[[], None]) -> None:
        """Connect to all servers at once.

        Args:
            world_size: 1 plus the processes of all servers.
            request: Brings its `init_info` to each server, to all at the same time: each answers when all are there.

        Raises:
            TrainingError: If the connection fails.
        """
        ...

    def send(self, bucket: Bucket, request: Callable[[dict[str, Any]], None]) -> None:
        """Give a bucket to all servers; when it returns they have it and its memory may be used again.

        Args:
            bucket: What to send.
            request: Brings the object it is given to every server, to all at the same time.

        Raises:
            TrainingError: If the connection fails.
        """
        ...

    def close(self) -> None:
        """Release what is held."""
        ...


class BucketSource(Protocol):
    """The end in a process that holds a server's weights."""

    def receive(self, update: dict[str, Any]) -> Bucket:
        """Take the bucket that an object from `WeightTransport.send` describes; its memory is never written to later.

        Raises:
            ValueError: If the object is not as it should be.
            RuntimeError: If the bytes cannot be had.
        """
        ...

    def close(self) -> None:
        """Release what is held."""
        ...


def choose_transport(
    setting: Literal["auto", "process_group", "shared_memory", "cuda_ipc"], *, device: torch.device, same_machine: bool
) -> TransportName:
    """Decide how weights travel.

    Args:
        setting: `vllm.weight_transport`.
        device: Where the trainer's weights are.
        same_machine: Whether every server is on this machine.

    Raises:
        TrainingError: If what is set cannot work here.
    """
    shares = same_machine and hasattr(os, "memfd_create")
    if setting == "auto":
        return "shared_memory" if shares and device.type == "cpu" else "process_group"
    where = "on this machine" if same_machine else "on another machine"
    if setting == "shared_memory" and not (shares and device.type == "cpu"):
        raise TrainingError(
            f"vllm.weight_transport: shared_memory is for CPUs of one Linux machine; here: {device.type}, a server {where}",
            hint="auto takes what fits",
        )
    if setting == "cuda_ipc" and not (same_machine and device.type == "cuda"):
        raise TrainingError(
            f"vllm.weight_transport: cuda_ipc is for a server on the GPUs that train; here: {device.type}, a server {where}",
            hint="auto takes what fits",
        )
    return setting


def build_transport(
    name: TransportName, *, device: torch.device, host: str, port: int, timeout_seconds: float = PATIENCE_SECONDS
) -> WeightTransport:
    """Make the trainer's end.

    Args:
        name: From `choose_transport`.
        device: Where the trainer's weights are.
        host: Address of this machine for a process group.
        port: For a process group; 0 takes a free one.
        timeout_seconds: For a process group to form, and for one bucket to be broadcast.

    Raises:
        TrainingError: If it cannot listen there.
    """
    match name:
        case "process_group":
            return ProcessGroupTransport(host=host, port=port, device=device, timeout_seconds=timeout_seconds)
        case "shared_memory":
            return SharedMemoryTransport()
        case "cuda_ipc":
            return CudaIpcTransport()
        case unknown:
            assert_never(unknown)


def build_source(info: dict[str, Any], *, rank: int, device: torch.device) -> BucketSource:
    """Make the end in a server's process.

    Args:
        info: From `WeightTransport.init_info`.
        rank: Of this process among those of its server.
        device: Where the weights are wanted.

    Raises:
        ValueError: If the transport is unknown here.
    """
    match info.get("transport"):
        case "process_group":
            return ProcessGroupSource(info, rank=rank, device=device)
        case "shared_memory":
            return SharedMemorySource(device=device)
        case "cuda_ipc":
            return CudaIpcSource(device=device)
        case unknown:
            raise ValueError(f"unknown weight transport {unknown!r}; the server may be of another version of grpo")
