"""Which transport is taken, what each refuses in a line, and that shared memory is not open to others."""

import os
import socket
from typing import Any

import psutil
import pytest
import torch
from weight_sending import CPU, HOST, WEIGHTS, build, send_all

from grpo_cli.errors import TrainingError
from grpo_cli.rollout.sync.buckets import pack, unpack
from grpo_cli.rollout.sync.transports import (
    TransportName,
    address_towards,
    build_source,
    build_transport,
    choose_transport,
)


@pytest.mark.parametrize(
    ("setting", "device", "same_machine", "chosen"),
    [
        ("auto", "cpu", True, "shared_memory"),
        ("auto", "cpu", False, "process_group"),
        ("auto", "cuda", True, "process_group"),
        ("auto", "cuda", False, "process_group"),
        ("process_group", "cpu", True, "process_group"),
        ("shared_memory", "cpu", True, "shared_memory"),
        ("cuda_ipc", "cuda", True, "cuda_ipc"),
    ],
)
def test_the_transport_fits_the_device_and_the_machine(
    setting: Any, device: str, same_machine: bool, chosen: TransportName
) -> None:
    assert choose_transport(setting, device=torch.device(device), same_machine=same_machine) == chosen


@pytest.mark.parametrize(
    ("setting", "device", "same_machine"),
    [
        ("shared_memory", "cuda", True),
        ("shared_memory", "cpu", False),
        ("cuda_ipc", "cpu", True),
        ("cuda_ipc", "cuda", False),
    ],
)
def test_a_transport_that_cannot_work_is_refused(setting: Any, device: str, same_machine: bool) -> None:
    with pytest.raises(TrainingError, match=rf"vllm\.weight_transport: {setting} is for .*; here: {device}"):
        choose_transport(setting, device=torch.device(device), same_machine=same_machine)


def test_a_process_group_listens_on_its_address_alone() -> None:
    before = {item.laddr for item in psutil.Process().net_connections("tcp")}
    transport = build("process_group")
    opened = [item for item in psutil.Process().net_connections("tcp") if item.laddr not in before]
    assert [item.laddr.ip for item in opened if item.status == psutil.CONN_LISTEN] == [HOST]
    transport.close()


def test_a_port_that_is_taken_is_one_line_with_the_key() -> None:
    with socket.create_server((HOST, 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(TrainingError, match=rf"cannot listen .* on {HOST}, port {port}: ") as caught:
            build_transport("process_group", device=CPU, host=HOST, port=port, timeout_seconds=1)
    assert "vllm.group_port" in str(caught.value.hint)


def test_an_address_of_another_machine_is_one_line_with_the_key() -> None:
    with pytest.raises(TrainingError, match=r"cannot listen .* on 192\.0\.2\.1") as caught:  # reserved for examples
        build_transport("process_group", device=CPU, host="192.0.2.1", port=0, timeout_seconds=1)
    assert "vllm.group_host" in str(caught.value.hint)


def test_the_address_that_leads_to_this_machine_is_the_loopback() -> None:
    assert address_towards("localhost") in {HOST, "::1"}


def test_a_host_that_does_not_exist_is_one_line() -> None:
    with pytest.raises(TrainingError, match=r"no\.such\.host\.invalid cannot be reached"):
        address_towards("no.such.host.invalid")


def test_tensors_without_elements_can_be_shared() -> None:
    transport, received = build("shared_memory"), []
    transport.open(world_size=2, request=lambda: None)
    source = build_source(transport.init_info(rank_offset=1, world_size=2), rank=0, device=CPU)
    (bucket,) = pack([("empty", torch.zeros(0, 4))], bucket_bytes=100)
    transport.send(bucket, lambda values: received.append(source.receive(values)))
    assert [(name, tuple(tensor.shape)) for name, tensor in unpack(received[0])] == [("empty", (0, 4))]


def test_a_transport_of_another_version_is_named() -> None:
    with pytest.raises(ValueError, match="unknown weight transport 'pigeon'"):
        build_source({"transport": "pigeon"}, rank=0, device=CPU)


def test_shared_memory_of_a_process_that_is_gone_is_explained() -> None:
    source = build_source({"transport": "shared_memory"}, rank=0, device=CPU)
    values = {"slots": [], "num_bytes": 0, "process": 2**22 + 1, "descriptor": 3}  # above the largest process id
    with pytest.raises(RuntimeError, match=r"one machine, in one container.*process_group"):
        source.receive(values)


def test_shared_memory_opens_nothing_but_buckets() -> None:
    source = build_source({"transport": "shared_memory"}, rank=0, device=CPU)
    with open(__file__, "rb") as other, pytest.raises(ValueError, match="is no bucket"):  # noqa: PTH123  its descriptor
        source.receive({"slots": [], "num_bytes": 0, "process": os.getpid(), "descriptor": other.fileno()})


def test_shared_memory_leaves_no_descriptor_behind() -> None:
    transport = build("shared_memory")
    transport.open(world_size=2, request=lambda: None)
    before = psutil.Process().num_fds()
    source = build_source(transport.init_info(rank_offset=1, world_size=2), rank=0, device=CPU)
    received = []
    send_all(transport, lambda values: received.append(source.receive(values)))
    assert psutil.Process().num_fds() == before
    assert {name for bucket in received for name, _ in unpack(bucket)} == dict(WEIGHTS).keys()
