"""Weights for servers, and waiting for them, over real sockets to servers that fail in every way."""

import re
import time
from typing import Any

import pytest
import torch
from protocol_server import DROP, Fault
from server_engines import Build, Serve, expected_ids, generate, ids_of, many, synced, weights

from grpo_cli.errors import ModelError, TrainingError
from grpo_cli.rollout.sync.transports import ProcessGroupTransport, SharedMemoryTransport, WeightTransport
from grpo_cli.rollout.vllm.fit import Needs
from grpo_cli.types import PolicyVersion


@pytest.mark.parametrize("kind", ["shared_memory", "process_group"])
def test_weights_reach_every_process_of_every_server(serve: Serve, build: Build, kind: str) -> None:
    servers = [serve(world_size=2), serve(world_size=1)]
    transport: WeightTransport = SharedMemoryTransport()
    if kind == "process_group":
        transport = ProcessGroupTransport(host="127.0.0.1", port=0, device=torch.device("cpu"), timeout_seconds=20)
    engine = build(*servers, transport=transport)
    for version in (1, 2):
        report = engine.sync(weights(version), PolicyVersion(version))
        sent = dict(weights(version))
        for server in servers:
            assert server.version == version
            assert len(server.weights) == server.world_size
            for received in server.weights:
                assert received.keys() == sent.keys()
                assert all(torch.equal(received[name], sent[name]) for name in sent)
        assert report.bytes == 4 * 8 * 5 * 4
    for server in servers:
        assert server.paths() == [
            "/pause",
            "/init_weight_transfer_engine",
            *[
                "/start_weight_update",
                *["/update_weights"] * 4,
                "/finish_weight_update",
                "/reset_prefix_cache",
                "/resume",
            ],
            "/pause",
            *[
                "/start_weight_update",
                *["/update_weights"] * 4,
                "/finish_weight_update",
                "/reset_prefix_cache",
                "/resume",
            ],
        ]


@pytest.mark.parametrize("path", ["/update_weights", "/finish_weight_update", "/start_weight_update"])
@pytest.mark.parametrize(("fault", "kind"), [(DROP, "shared_memory"), (500, "process_group")])
def test_failed_sync_begins_anew_and_is_whole(serve: Serve, build: Build, path: str, fault: Fault, kind: str) -> None:
    server, other = serve(), serve()
    transport: WeightTransport = SharedMemoryTransport()
    if kind == "process_group":
        transport = ProcessGroupTransport(host="127.0.0.1", port=0, device=torch.device("cpu"), timeout_seconds=5)
    engine = synced(build(server, other, transport=transport), version=1)
    server.faults[path].append(fault)
    synced(engine, version=2)
    for one in (server, other):
        assert not one.paused
        assert one.paths().count("/resume") == 2
        [received] = one.weights
        assert all(torch.equal(received[name], tensor) for name, tensor in weights(2))
    prompts = many(2)
    assert ids_of(generate(engine, prompts)) == expected_ids(prompts, server.checksum, 3)


@pytest.mark.parametrize(
    ("path", "fault", "said"),
    [
        ("/update_weights", 500, "POST /update_weights: 500, told to answer 500"),
        ("/init_weight_transfer_engine", 500, "POST /init_weight_transfer_engine: 500"),
        ("/reset_prefix_cache", lambda _: {"success": False}, "it did not forget the keys and values"),
    ],
)
def test_server_that_does_not_take_the_weights_stays_paused(
    serve: Serve, build: Build, path: str, fault: Fault, said: str
) -> None:
    server = serve()
    engine = build(server)
    server.always[path] = fault
    with pytest.raises(TrainingError) as caught:
        engine.sync(weights(), PolicyVersion(1))
    assert said in caught.value.message
    assert server.url in caught.value.message
    assert server.paused
    assert "/resume" not in server.paths()
    with pytest.raises(TrainingError):
        generate(engine, many(1))
    assert "/v1/completions" not in server.paths()
    server.always.clear()
    generate(synced(engine), many(1))


@pytest.mark.parametrize("lie", [{"policy_version": 0}, {"checksum": "f" * 32}])
def test_server_that_has_other_weights_after_a_sync_is_found_out(
    serve: Serve, build: Build, lie: dict[str, Any]
) -> None:
    server = serve()
    server.always["/grpo/status"] = lambda right: {**right, **lie}
    with pytest.raises(TrainingError, match=r"instead of version 1 \(checksum [0-9a-f]{32}\) that were sent"):
        build(server).sync(weights(), PolicyVersion(1))
    assert server.paused


def test_sync_without_any_server_is_an_error(serve: Serve, build: Build) -> None:
    server = serve()
    engine = build(server)
    server.stop()
    with pytest.raises(TrainingError, match=f"{re.escape(server.url)}: GET /health: connection refused"):
        engine.sync(weights(), PolicyVersion(1))


def test_waiting_ends_when_all_servers_are_there(serve: Serve, build: Build) -> None:
    ready, late = serve(), serve()
    late.faults["/health"].extend([503, DROP, DROP, DROP])
    lines: list[str] = []
    build(ready, late, needs=Needs(longest=512)).wait_until_ready(20, on_wait=lines.append)
    waiting = f"waiting for vLLM server {late.url}: GET /health: "
    assert [line.rpartition(" (")[0] for line in lines] == [
        f"{waiting}503, told to answer 503 (its engine is dead, or not ready)",
        f"{waiting}Server disconnected without sending a response",
    ]


def test_waiting_has_an_end_and_says_what_was_answered_last(serve: Serve, build: Build) -> None:
    server = serve()
    engine = build(server)
    server.stop()
    with pytest.raises(TrainingError) as caught:
        engine.wait_until_ready(0.2)
    assert caught.value.message == (
        f"vLLM server {server.url}: GET /health: connection refused; waited 0.2 s (vllm.server_timeout)"
    )


def test_wrong_token_and_foreign_server_are_not_waited_for(serve: Serve, build: Build) -> None:
    begin = time.monotonic()
    with pytest.raises(TrainingError, match="401, the token is missing or wrong"):
        build(serve(token="secret"), token="other").wait_until_ready(60)
    foreign = serve()
    foreign.always["/grpo/status"] = 404
    with pytest.raises(TrainingError, match="is no `grpo vllm-serve`"):
        build(foreign).wait_until_ready(60)
    assert time.monotonic() - begin < 15


def test_server_for_shorter_sequences_is_refused(serve: Serve, build: Build) -> None:
    server = serve(max_model_len=100)
    build(server, needs=Needs(longest=100)).wait_until_ready(5)
    build(server, needs=Needs(longest=None)).wait_until_ready(5)
    with pytest.raises(ModelError) as caught:
        build(server, needs=Needs(longest=101)).wait_until_ready(5)
    assert caught.value.message == (
        f"vLLM server {server.url}: its longest sequence is 100 tokens, but a prompt and its completion can have 101 here"
    )
    assert caught.value.hint is not None
    assert "generation.max_completion_length" in caught.value.hint


def test_server_on_another_kind_of_device_is_refused(serve: Serve, build: Build) -> None:
    server = serve()
    build(server, needs=Needs(device="cpu")).wait_until_ready(5)
    with pytest.raises(ModelError, match=f"{server.url}: it computes on cpu, but this run trains on cuda"):
        build(server, needs=Needs(device="cuda")).wait_until_ready(5)


def test_server_for_fewer_completions_is_refused(serve: Serve, build: Build) -> None:
    server = serve()
    build(server, needs=Needs(num_generations=64)).wait_until_ready(5)
    with pytest.raises(
        ModelError, match="it samples up to 64 completions of a prompt, but this run asks for 65"
    ) as found:
        build(server, needs=Needs(num_generations=65)).wait_until_ready(5)
    assert "--max-num-generations 65" in str(found.value.hint)


def test_two_addresses_of_one_server_are_refused(serve: Serve, build: Build) -> None:
    server, twin = serve(), serve()
    twin.instance = server.instance
    with pytest.raises(TrainingError, match=r"vllm.server_base_urls: .* are the same server"):
        build(server, twin).wait_until_ready(5)
