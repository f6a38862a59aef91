"""Buckets on the GPU that trains, opened there by a server's process through CUDA's inter-process handles.

It is for a server on the very GPUs that train, where NCCL refuses two ranks on one device. Handles travel as numbers and text;
nothing is pickled.
"""

from base64 import b64decode, b64encode
from collections.abc import Callable
from typing import Any

import torch

from grpo_cli.rollout.sync.buckets import Bucket, slots_from_json, slots_to_json


class CudaIpcTransport:
    """The trainer's end (a `WeightTransport`)."""

    def __init__(self) -> None:
        self._opened = False

    @property
    def is_open(self) -> bool:
        """Whether the servers were told and all went well since."""
        return self._opened

    def init_info(self, *, rank_offset: int, world_size: int) -> dict[str, Any]:  # noqa: ARG002  there are no ranks
        """Tell a server what to expect."""
        return {"transport": "cuda_ipc"}

    def open(self, *, world_size: int, request: Callable[[], None]) -> None:  # noqa: ARG002
        """Tell the servers; see `WeightTransport`."""
        request()
        self._opened = True

    def send(self, bucket: Bucket, request: Callable[[dict[str, Any]], None]) -> None:
        """Lend a bucket until the servers have copied it; see `WeightTransport`."""
        self._opened = False  # unless all goes well
        device = bucket.data.device
        torch.cuda.current_stream(device).synchronize()
        storage: Any = bucket.data.untyped_storage()
        # The handle is of the allocation that the storage lies in.
        _, handle, size, offset, counter, counter_offset, event, _ = storage._share_cuda_()
        request(
            {
                "slots": slots_to_json(bucket.slots),
                "num_bytes": bucket.num_bytes,
                "gpu": str(torch.cuda.get_device_properties(device).uuid),
                "handle": _text(handle),
                "storage_bytes": size,
                "storage_offset": offset,
                "counter": _text(counter),
                "counter_offset": counter_offset,
                "event": _text(event),
            }
        )
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        self._opened = True

    def close(self) -> None:
        """Nothing is held between two buckets."""
        self._opened = False


class CudaIpcSource:
    """A server process's end (a `BucketSource`).

    Args:
        device: Where the weights are wanted.
    """

    def __init__(self, *, device: torch.device) -> None:
        self._device = device

    def receive(self, update: dict[str, Any]) -> Bucket:
        """Open a bucket on the GPU where it lies and copy it: the trainer uses that memory again as soon as it is answered."""
        num_bytes = int(update["num_bytes"])
        slots = slots_from_json(update["slots"], num_bytes=num_bytes)
        storage = torch.UntypedStorage._new_shared_cuda(  # noqa: SLF001  what torch.multiprocessing does, without its pickles
            _device_of(str(update["gpu"])),
            _bytes(update["handle"]),
            int(update["storage_bytes"]),
            int(update["storage_offset"]),
            _bytes(update["counter"]),
            int(update["counter_offset"]),
            _bytes(update["event"]),
            False,  # the sender has waited for its stream
        )
        lent = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[:num_bytes]
        data = lent.to(self._device, copy=True)
        torch.cuda.synchronize(lent.device)
        return Bucket(slots=slots, data=data)

    def close(self) -> None:
        """Nothing is held between two buckets."""


def _device_of(uuid: str) -> int:
    """Give this process's number of a GPU, which may differ from the sender's."""
    for device in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(device).uuid) == uuid:
            return device
    raise RuntimeError(
        f"the GPU {uuid} that trains is not visible to vLLM: cuda_ipc needs it there; set vllm.weight_transport to process_group"
    )


def _text(raw: bytes) -> str:
    return b64encode(raw).decode("ascii")


def _bytes(text: object) -> bytes:
    return b64decode(str(text), validate=True)
