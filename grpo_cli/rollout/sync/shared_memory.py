"""Buckets through memory that two processes of one machine share, without a copy on the way in.

Each bucket lies in a file that exists only in memory and has no name: it vanishes with the last process that holds it, even
if that is killed, and the size of /dev/shm does not matter. The receiver opens it as the sender's descriptor.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from grpo_cli.rollout.sync.buckets import Bucket, slots_from_json, slots_to_json

_NAME = "grpo-weights"


class SharedMemoryTransport:
    """The trainer's end (a `WeightTransport`)."""

    def __init__(self) -> None:
        self._opened = False

    @property
    def is_open(self) -> bool:
        """Whether the servers were told and all went well since: there is no connection, but a server may have been replaced."""
        return self._opened

    def init_info(self, *, rank_offset: int, world_size: int) -> dict[str, Any]:  # noqa: ARG002  there are no ranks
        """Tell a server what to expect."""
        return {"transport": "shared_memory"}

    def open(self, *, world_size: int, request: Callable[[], None]) -> None:  # noqa: ARG002
        """Tell the servers; see `WeightTransport`."""
        request()
        self._opened = True

    def send(self, bucket: Bucket, request: Callable[[dict[str, Any]], None]) -> None:
        """Share a copy of a bucket until the servers have it; see `WeightTransport`."""
        self._opened = False  # unless all goes well
        descriptor = os.memfd_create(_NAME)
        try:
            os.ftruncate(descriptor, bucket.num_bytes)
            shared = _mapped(_path(os.getpid(), descriptor), bucket.num_bytes, writable=True)
            shared.copy_(bucket.data)
            del shared
            request(
                {
                    "slots": slots_to_json(bucket.slots),
                    "num_bytes": bucket.num_bytes,
                    "process": os.getpid(),
                    "descriptor": descriptor,
                }
            )
        finally:
            os.close(descriptor)
        self._opened = True

    def close(self) -> None:
        """Nothing is held between two buckets."""
        self._opened = False


class SharedMemorySource:
    """A server process's end (a `BucketSource`).

    Args:
        device: Where the weights are wanted.
    """

    def __init__(self, *, device: torch.device) -> None:
        self._device = device

    def receive(self, update: dict[str, Any]) -> Bucket:
        """Map a bucket; on a CPU its tensors are the very memory that the trainer wrote, alive as long as they are used."""
        num_bytes = int(update["num_bytes"])
        slots = slots_from_json(update["slots"], num_bytes=num_bytes)
        path = _path(int(update["process"]), int(update["descriptor"]))
        try:
            found, size = Path(path).readlink().name, Path(path).stat().st_size
        except OSError as error:
            raise RuntimeError(
                f"the trainer's memory cannot be opened ({error.strerror}): shared memory needs both processes on one machine, "
                "in one container and of one user; elsewhere set vllm.weight_transport to process_group"
            ) from error
        if not found.startswith(f"memfd:{_NAME}") or size != num_bytes:
            raise ValueError(f"{found} of {size} bytes is no bucket of {num_bytes} bytes")
        return Bucket(slots=slots, data=_mapped(path, num_bytes, writable=False).to(self._device))

    def close(self) -> None:
        """Nothing is held between two buckets."""


def _path(process: int, descriptor: int) -> str:
    return f"/proc/{process}/fd/{descriptor}"


def _mapped(path: str, num_bytes: int, *, writable: bool) -> torch.Tensor:
    """Map a file; if it is not writable here, writing to the tensor does not reach it."""
    if num_bytes == 0:  # there are tensors without elements, but no such mappings
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(path, shared=writable, size=num_bytes, dtype=torch.uint8)
