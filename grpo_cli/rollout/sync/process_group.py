"""Buckets by broadcast, in a process group of the trainer and every process that holds a server's weights: NCCL, or gloo on CPUs.

The trainer is rank 0 and listens for the others on one address of its machine. What is listened to there has no authentication:
where a group meets has a random name, which servers are told over HTTP, behind their token.

A group that failed is never used again. Whoever still waits for it is set free: the store in which ranks wait for each other is
closed, connections end with their group, and nothing takes longer than its time-out.
"""

import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (  # torch.distributed has the same, but its types do not say so
    Backend,
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
)

from grpo_cli.errors import TrainingError
from grpo_cli.rollout.sync.buckets import Bucket, slots_from_json, slots_to_json

T = TypeVar("T")

PATIENCE_SECONDS = 60.0
"""All ranks are asked at the same time, and each comes at once; a bucket of 256 MiB takes that long at 4 MiB/s. Whoever takes longer
is gone."""

_STORE_SECONDS = 5.0
"""The store listens before anybody is asked to come there; if nobody answers, it has been closed."""


class ProcessGroupTransport:
    """The trainer's end (a `WeightTransport`).

    Args:
        host: Address of this machine under which the servers reach it; only there it listens.
        port: To listen on; 0 takes a free one.
        device: Where the buckets are.
        timeout_seconds: For the group to come together, and for a bucket to be taken, once servers are asked.

    Raises:
        TrainingError: If it cannot listen there.
    """

    def __init__(
        self, *, host: str, port: int, device: torch.device, timeout_seconds: float = PATIENCE_SECONDS
    ) -> None:
        self._host = host
        self._port = port
        self._device = device
        self._timeout = timedelta(seconds=timeout_seconds)
        self._store: TCPStore | None = _listen(host, port, self._timeout)
        self._group: Backend | None = None
        self._name = ""

    @property
    def is_open(self) -> bool:
        """Whether the group is whole, as far as is known."""
        return self._group is not None

    def init_info(self, *, rank_offset: int, world_size: int) -> dict[str, Any]:
        """Tell a server where to join, and that its first process is rank `rank_offset` of `world_size`."""
        assert self._store is not None, "to be asked for inside open()"
        return {
            "transport": "process_group",
            "rank_offset": rank_offset,
            "world_size": world_size,
            "host": self._host,
            "port": self._store.port,
            "group": self._name,
            "timeout_seconds": self._timeout.total_seconds(),
        }

    def open(self, *, world_size: int, request: Callable[[], None]) -> None:
        """Form a group with all servers; see `WeightTransport`."""
        self.close()
        if self._store is None:
            self._store = _listen(self._host, self._port, self._timeout)
        self._name = secrets.token_hex(16)
        join = partial(
            join_group,
            meeting_place(self._host, self._store.port, self._name),  # the thread must not keep the store itself open
            rank=0,
            world_size=world_size,
            device=self._device,
            listens_on=self._host,
            timeout=self._timeout,
        )
        try:
            self._group = self._while_asked(join, request)
        except BaseException:
            self._store = None  # those that wait in it for the others are free
            raise

    def send(self, bucket: Bucket, request: Callable[[dict[str, Any]], None]) -> None:
        """Broadcast a bucket while the servers are asked to take part; see `WeightTransport`."""
        group = self._group
        assert group is not None, "open() comes first"
        if bucket.data.is_cuda:
            torch.cuda.current_stream(bucket.data.device).synchronize()  # the other thread has another stream
        update = {"slots": slots_to_json(bucket.slots), "num_bytes": bucket.num_bytes}
        try:
            self._while_asked(lambda: broadcast(group, bucket.data), lambda: request(update))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave the group, whatever it is doing."""
        if self._group is not None:
            self._group.abort()
            self._group = None

    def _while_asked(self, work: Callable[[], T], request: Callable[[], None]) -> T:
        """Do in a thread what waits for the servers, while this one asks them: a signal is heard here, and so is their refusal.

        If they refuse, the thread is left to wait until the others have left the group too or its time is over; it does not keep
        the process alive.
        """
        outcome: Future[T] = Future()

        def run() -> None:
            try:
                outcome.set_result(work())
            except BaseException as error:  # noqa: BLE001  it is raised in the thread that waits
                outcome.set_exception(error)

        threading.Thread(target=run, name="weight-transfer", daemon=True).start()
        request()
        try:
            return outcome.result(self._timeout.total_seconds())
        except (RuntimeError, TimeoutError) as error:  # torch.distributed's errors are RuntimeErrors
            raise TrainingError(
                f"the process group for weights at {self._host} failed: {str(error).splitlines()[0] or 'it took too long'}",
                hint=_hint(str(error)),
            ) from error


class ProcessGroupSource:
    """A server process's end (a `BucketSource`).

    Args:
        info: What `ProcessGroupTransport.init_info` gave.
        rank: Of this process among those of its server.
        device: Where the weights are wanted.
    """

    def __init__(self, info: dict[str, Any], *, rank: int, device: torch.device) -> None:
        self._device = device
        host = str(info["host"])
        self._group: Backend | None = join_group(
            meeting_place(host, int(info["port"]), str(info["group"])),
            rank=int(info["rank_offset"]) + rank,
            world_size=int(info["world_size"]),
            device=device,
            listens_on=address_towards(host),
            timeout=timedelta(seconds=float(info["timeout_seconds"])),
        )

    def receive(self, update: dict[str, Any]) -> Bucket:
        """Take part in the broadcast of a bucket; leave the group if that fails, so that nobody waits for this process."""
        if self._group is None:
            raise RuntimeError("the process group for weights is gone; the trainer must connect anew")
        try:
            num_bytes = int(update["num_bytes"])
            slots = slots_from_json(update["slots"], num_bytes=num_bytes)
            data = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            broadcast(self._group, data)
        except BaseException:
            self.close()
            raise
        return Bucket(slots=slots, data=data)

    def close(self) -> None:
        """Leave the group, whatever it is doing."""
        if self._group is not None:
            self._group.abort()
            self._group = None


def meeting_place(host: str, port: int, name: str) -> Store:
    """Connect to the trainer's store, where the ranks of the group of that name find each other.

    Raises:
        RuntimeError: If it does not answer.
    """
    patience = timedelta(seconds=_STORE_SECONDS)
    return PrefixStore(name, TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=patience))


def join_group(
    store: Store,
    *,
    rank: int,
    world_size: int,
    device: torch.device,
    listens_on: str,
    timeout: timedelta,
) -> Backend:
    """Become a rank of a group that `torch.distributed` knows nothing of: the trainer's own group stays the default one.

    Args:
        store: A `meeting_place`.
        rank: Of this process.
        world_size: Ranks of the group.
        device: Decides between gloo and NCCL.
        listens_on: Address of this machine for gloo.
        timeout: For the ranks to meet, and for each broadcast.

    Raises:
        RuntimeError: If one of them does not come, or the store is closed.
    """
    # Nobody connects before all are there: NCCL would wait for one that never comes, and cannot be told to stop.
    # Apart from the group's own keys: NCCL's first one is "0", where the others would find our word and not what they connect with.
    meeting = PrefixStore("meeting", store)
    meeting.set(str(rank), "here")
    meeting.wait([str(other) for other in range(world_size)], timeout)
    if device.type == "cpu":
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001  the only way to choose the address
        options._timeout = timeout  # noqa: SLF001
        options._devices = [ProcessGroupGloo.create_device(hostname=listens_on)]  # noqa: SLF001
        return ProcessGroupGloo(store, rank, world_size, options)
    nccl_options = dist.ProcessGroupNCCL.Options()
    nccl_options._timeout = timeout  # noqa: SLF001
    with _errors_raised_by_wait():
        group = dist.ProcessGroupNCCL(store, rank, world_size, nccl_options)
    broadcast(
        group, torch.zeros(1, dtype=torch.uint8, device=device)
    )  # NCCL connects at the first use: let it fail here
    return group


def broadcast(group: Backend, data: torch.Tensor) -> None:
    """Give rank 0's bytes to all ranks; returns when this rank has done its part."""
    options = BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    group.broadcast([data], options).wait()  # type: ignore[attr-defined]  # its type leaves it out
    if data.is_cuda:
        torch.cuda.current_stream(data.device).synchronize()


@contextmanager
def _errors_raised_by_wait() -> Iterator[None]:
    """Let a lost peer be an error of the broadcast; by default NCCL's watchdog ends the whole process."""
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _hint(failure: str) -> str:
    """Say what helps when the group could not be formed."""
    if "Duplicate GPU" in failure:  # NCCL
        return "a server computes on a GPU that trains: give it another, or set vllm.weight_transport: cuda_ipc"
    return "vllm.group_host must be an address of this machine that every server reaches"


def address_towards(host: str) -> str:
    """Give the address of this machine from which packets to `host` leave. Nothing is sent.

    Raises:
        TrainingError: If the name is unknown or no network leads there.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise TrainingError(f"{host} cannot be reached from this machine: {error.strerror or error}") from error


def _listen(host: str, port: int, timeout: timedelta) -> TCPStore:
    """Start the store on one address; left alone it listens on all of them."""
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        raise TrainingError(
            f"cannot listen for vLLM's processes on {host}, port {port}: {error.strerror or error}",
            hint="vllm.group_host must be an address of this machine, and vllm.group_port free (0 takes a free one)",
        ) from error
    return TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )
