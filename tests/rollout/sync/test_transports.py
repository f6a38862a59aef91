"""Buckets between real processes: the trainer here, and processes that stand where vLLM's do."""

import contextlib
import multiprocessing
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from weight_sending import CPU, HOST, TIMEOUT, TRANSPORTS, WEIGHTS, build, send_all

from grpo_cli.errors import TrainingError
from grpo_cli.rollout.sync.buckets import Bucket, pack, unpack
from grpo_cli.rollout.sync.checksum import Checksum
from grpo_cli.rollout.sync.process_group import join_group
from grpo_cli.rollout.sync.transports import (
    TransportName,
    WeightTransport,
    build_source,
    build_transport,
)


def receiving_process(pipe: Connection, rank: int) -> None:
    """Does what it is told, as a worker of vLLM; keeps every bucket and says in the end what is in them."""
    torch.set_num_threads(1)
    source: Any = None
    buckets: list[Bucket] = []
    while True:
        try:
            what, value = pipe.recv()
        except EOFError:
            return
        try:
            match what:
                case "init":
                    buckets = []
                    source = build_source(value, rank=rank, device=CPU)
                    pipe.send(("done", None))
                case "update":
                    buckets.append(source.receive(value))
                    pipe.send(("done", None))
                case "result":
                    checksum = Checksum()
                    for bucket in buckets:
                        checksum.add(bucket)
                    sums = {name: float(tensor.double().sum()) for bucket in buckets for name, tensor in unpack(bucket)}
                    pipe.send(("done", (checksum.value, sums)))
        except (RuntimeError, ValueError) as error:
            pipe.send(("failed", str(error)))


def forking() -> ForkServerContext:
    """Make processes without a start of several seconds each: they are forked from one that has imported torch, and does nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "grpo_cli.rollout.sync.transports"])
    return context


class Servers:
    """Two receiving processes, and the control plane to them."""

    def __init__(self, number: int = 2) -> None:
        context = forking()
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for _ in range(number):
            ours, theirs = context.Pipe()
            process = context.Process(target=receiving_process, args=(theirs, 0), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self.ask([("result", None)] * number)  # they take seconds to start

    def ask(self, messages: list[tuple[str, Any]]) -> list[Any]:
        for pipe, message in zip(self.pipes, messages, strict=True):
            pipe.send(message)
        answers = []
        for pipe in self.pipes:
            try:
                state, value = pipe.recv()
            except (EOFError, ConnectionResetError) as error:
                raise TrainingError("a server is gone") from error
            if state == "failed":
                raise TrainingError(value)
            answers.append(value)
        return answers

    def connect(self, transport: WeightTransport) -> None:
        world_size = 1 + len(self.pipes)

        def request() -> None:
            self.ask(
                [
                    ("init", transport.init_info(rank_offset=1 + number, world_size=world_size))
                    for number in range(len(self.pipes))
                ]
            )

        transport.open(world_size=world_size, request=request)

    def update(self, values: dict[str, Any]) -> None:
        self.ask([("update", values)] * len(self.pipes))

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture
def servers() -> Iterator[Servers]:
    with contextlib.closing(Servers()) as both:
        yield both


def total(tensor: Tensor) -> float:
    return float(tensor.double().sum())


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSPORTS)
def test_all_processes_of_all_servers_get_the_very_bytes(name: TransportName, servers: Servers) -> None:
    transport = build(name)
    states = [transport.is_open]
    servers.connect(transport)
    states.append(transport.is_open)
    assert states == [False, True]
    sent = send_all(transport, servers.update)
    for received, sums in servers.ask([("result", None)] * 2):
        assert received == sent
        assert sums == {key: total(tensor) for key, tensor in WEIGHTS}
    transport.close()
    assert not torch.distributed.is_initialized()  # the trainer's own group is not ours to touch


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_refused_bucket_fails_at_once_and_a_new_connection_works(name: TransportName, servers: Servers) -> None:
    transport = build(name)
    servers.connect(transport)
    begun = time.monotonic()
    with pytest.raises(TrainingError, match="slots"):
        send_all(transport, lambda values: servers.update({**values, "slots": []}))
    assert time.monotonic() - begun < 30  # far below the time-out: the broadcast that nobody joins is left alone
    for pipe in servers.pipes:  # the refusal of the server that nobody listened to any more
        while pipe.poll(0.2):
            pipe.recv()
    servers.connect(transport)
    sent = send_all(transport, servers.update)
    assert [received for received, _ in servers.ask([("result", None)] * 2)] == [sent, sent]


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_server_that_is_killed_is_noticed_and_the_next_one_attaches(name: TransportName) -> None:
    transport = build(name)
    with contextlib.closing(Servers(1)) as servers:
        servers.connect(transport)

        def kill(_: dict[str, Any]) -> None:
            servers.processes[0].kill()
            servers.update({})

        begun = time.monotonic()
        with pytest.raises((TrainingError, BrokenPipeError)):
            send_all(transport, kill)
        assert time.monotonic() - begun < 30
    with contextlib.closing(Servers(1)) as servers:
        servers.connect(transport)
        sent = send_all(transport, servers.update)
        assert [received for received, _ in servers.ask([("result", None)])] == [sent]


def answer_within(seconds: float, pipe: Connection) -> tuple[str, Any]:
    assert pipe.poll(seconds), "it is not free"
    answer: tuple[str, Any] = pipe.recv()
    return answer


def ended_within(seconds: float) -> bool:
    """Wait for the threads that work for transports."""
    ends = time.monotonic() + seconds
    while any(thread.name == "weight-transfer" for thread in threading.enumerate()):
        if time.monotonic() > ends:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.slow
@pytest.mark.parametrize("refuses", [True, False], ids=["refuses", "dies"])
def test_a_server_is_free_within_seconds_if_another_does_not_connect(refuses: bool, servers: Servers) -> None:
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    transport = build("process_group", port=port)  # one port for all attempts, as behind a firewall

    def request() -> None:
        servers.pipes[1].send(("init", transport.init_info(rank_offset=2, world_size=3)))
        time.sleep(0.5)  # it waits for the other one now
        if refuses:
            servers.pipes[0].send(("init", {"transport": "pigeon"}))
        else:
            servers.processes[0].kill()
        try:
            state, _ = servers.pipes[0].recv()
        except EOFError:
            state = "dead"
        raise TrainingError(state)

    with pytest.raises(TrainingError, match="failed" if refuses else "dead"):
        transport.open(world_size=3, request=request)
    assert answer_within(10, servers.pipes[1])[0] == "failed"
    assert ended_within(10)
    if refuses:
        servers.connect(transport)
        sent = send_all(transport, servers.update)
        assert [received for received, _ in servers.ask([("result", None)] * 2)] == [sent, sent]


@pytest.mark.slow
def test_nobody_waits_longer_than_a_bucket_may_take(servers: Servers) -> None:
    """One server never hears of the bucket, and the connections stay."""
    transport = build("process_group", timeout=3)
    servers.connect(transport)
    (bucket,) = pack([("a", torch.zeros(1 << 22))], bucket_bytes=1)

    def request(update: dict[str, Any]) -> None:
        servers.pipes[1].send(("update", update))
        raise TrainingError("the other one is not reached")

    with pytest.raises(TrainingError, match="is not reached"):
        transport.send(bucket, request)
    assert not transport.is_open
    answer_within(10, servers.pipes[1])
    assert ended_within(10)
    servers.connect(transport)
    sent = send_all(transport, servers.update)
    assert [received for received, _ in servers.ask([("result", None)] * 2)] == [sent, sent]


def test_the_keys_that_nccl_will_use_are_free_after_ranks_have_met() -> None:
    """NCCL's rank 0 writes what the others connect with under the number of the connection, and they take what they find there."""
    store = HashStore()
    ranks = [
        threading.Thread(
            target=join_group,
            args=(store,),
            kwargs={"rank": rank, "world_size": 2, "device": CPU, "listens_on": HOST, "timeout": timedelta(seconds=60)},
        )
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert store.num_keys() > 2, "they have met there"
    assert not any(store.check([str(number)]) for number in range(4))


@pytest.mark.parametrize(
    ("failure", "hint"),
    [
        ("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000", "vllm.weight_transport: cuda_ipc"),
        ("socketPollConnect: connect returned No route to host", "vllm.group_host must be an address"),
    ],
)
def test_what_nccl_says_decides_what_helps(failure: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise torch.distributed.DistBackendError(
            f"NCCL error in: NCCLUtils.cpp:77, invalid usage\nLast error:\n{failure}"
        )

    monkeypatch.setattr("grpo_cli.rollout.sync.process_group.join_group", fail)
    transport = build_transport("process_group", device=CPU, host=HOST, port=0, timeout_seconds=TIMEOUT)
    with pytest.raises(TrainingError, match="NCCL error") as caught:
        transport.open(world_size=2, request=lambda: None)
    assert hint in (caught.value.hint or "")


def test_where_a_group_meets_cannot_be_guessed() -> None:
    transport, names = build("process_group"), []

    def refuse() -> None:
        names.append(transport.init_info(rank_offset=1, world_size=2)["group"])
        raise TrainingError("no")

    for _ in range(2):
        with pytest.raises(TrainingError, match="no"):
            transport.open(world_size=2, request=refuse)
    assert [len(bytes.fromhex(name)) for name in names] == [16, 16]
    assert names[0] != names[1]
    assert ended_within(10)


def trainer_that_connects(pipe: Connection) -> None:
    """Forms a group with the process at the other end, and then does nothing."""
    transport = build("process_group")

    def request() -> None:
        pipe.send(transport.init_info(rank_offset=1, world_size=2))
        pipe.recv()

    transport.open(world_size=2, request=request)
    pipe.recv()


@pytest.mark.slow
def test_a_server_does_not_wait_for_a_trainer_that_was_killed() -> None:
    context = forking()
    ours, theirs = context.Pipe()
    trainer = context.Process(target=trainer_that_connects, args=(theirs,), daemon=True)
    trainer.start()
    source = build_source(ours.recv(), rank=0, device=CPU)
    ours.send("joined")
    threading.Timer(0.5, trainer.kill).start()
    begun = time.monotonic()
    with pytest.raises(RuntimeError):
        source.receive({"slots": [{"name": "a", "dtype": "int8", "shape": [16]}], "num_bytes": 16})
    assert time.monotonic() - begun < 30
    trainer.join()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA's inter-process handles need a GPU")
def test_cuda_handles_open_the_very_bytes_in_another_process() -> None:
    device = torch.device("cuda", 0)
    transport = build_transport("cuda_ipc", device=device, host=HOST, port=0, timeout_seconds=TIMEOUT)
    with contextlib.closing(Servers(1)) as servers:
        servers.connect(transport)
        checksum = Checksum()
        on_gpu = [(name, tensor.to(device)) for name, tensor in WEIGHTS]
        for bucket in pack(on_gpu, bucket_bytes=4096):
            checksum.add(bucket)
            transport.send(bucket, servers.update)
            bucket.data.zero_()
        assert [received for received, _ in servers.ask([("result", None)])] == [checksum.value]
