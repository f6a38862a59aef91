"""Some weights, and how the tests of transports send them."""

from collections.abc import Callable
from typing import Any

import torch

from grpo_cli.rollout.sync.buckets import pack
from grpo_cli.rollout.sync.checksum import Checksum
from grpo_cli.rollout.sync.transports import TransportName, WeightTransport, build_transport

HOST = "127.0.0.1"
CPU = torch.device("cpu")
TIMEOUT = 60.0
TRANSPORTS: tuple[TransportName, ...] = ("process_group", "shared_memory")
WEIGHTS = [
    ("embedding", torch.arange(3000, dtype=torch.float32).view(60, 50)),
    ("half", torch.arange(100).bfloat16()),
    ("small", torch.tensor(3, dtype=torch.int8)),
    ("empty", torch.zeros(0, 4)),
    ("head", torch.arange(2000, dtype=torch.float16)),
]


def build(name: TransportName, *, port: int = 0, timeout: float = TIMEOUT) -> WeightTransport:
    return build_transport(name, device=CPU, host=HOST, port=port, timeout_seconds=timeout)


def send_all(transport: WeightTransport, request: Callable[[dict[str, Any]], None]) -> str:
    checksum = Checksum()
    for bucket in pack(WEIGHTS, bucket_bytes=4096):
        checksum.add(bucket)
        transport.send(bucket, request)
        bucket.data.zero_()  # its memory may be used again: what was sent must not change
    return checksum.value
