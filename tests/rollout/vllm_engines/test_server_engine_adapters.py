"""Adapters for servers: alone where the weights below them are, with these where they are not, and merged where there is no room."""

from collections.abc import Callable

import pytest
import torch
from protocol_server import DROP, ProtocolServer
from server_engines import Build, Serve, generate, many, weights

from grpo_cli.rollout.sync.adapters import MARK, Adapters
from grpo_cli.rollout.vllm.limits import ADAPTER_NAME
from grpo_cli.rollout.vllm.server_engine import ServerEngine
from grpo_cli.types import PolicyVersion

BELOW = weights(0)
MERGED = weights(1)
ADAPTERS = [("layer.0.lora_A", torch.ones(2, 5)), ("layer.0.lora_B", torch.ones(8, 2))]
ALONE = {f"{MARK}{name}" for name, _ in ADAPTERS}
WHOLE = ALONE | {name for name, _ in BELOW}


def sync(engine: ServerEngine, version: int) -> None:
    engine.sync(MERGED, PolicyVersion(version))


def received(server: ProtocolServer) -> set[str]:
    [weights] = server.weights
    return set(weights)


@pytest.fixture
def adapters() -> Adapters:
    return Adapters(below=BELOW, adapters=ADAPTERS, rank=2)


def test_adapters_go_alone_once_all_servers_have_what_is_below_them(
    serve: Serve, build: Build, adapters: Adapters
) -> None:
    one, other = serve(max_lora_rank=8), serve(max_lora_rank=8)
    engine = build(one, other, adapters=adapters)
    sync(engine, 1)
    assert received(one) == received(other) == WHOLE
    sync(engine, 2)
    assert received(one) == received(other) == ALONE
    generate(engine, many(1))
    assert {body["model"] for path, body in [*one.calls, *other.calls] if path == "/v1/completions"} == {ADAPTER_NAME}
    one.restart()
    sync(engine, 3)
    assert received(one) == received(other) == WHOLE


@pytest.mark.parametrize(
    "disturb",
    [
        lambda server, build: build(server).sync(weights(7), PolicyVersion(2)),
        lambda server, _build: server.faults["/update_weights"].append(500),
        lambda server, _build: server.faults["/finish_weight_update"].append(DROP),
    ],
    ids=["another run's weights", "an update that failed", "an end that failed"],
)
def test_what_is_below_goes_again_after(
    disturb: Callable[[ProtocolServer, Build], object], serve: Serve, build: Build, adapters: Adapters
) -> None:
    server = serve(max_lora_rank=8)
    engine = build(server, adapters=adapters)
    sync(engine, 1)
    sync(engine, 2)
    assert received(server) == ALONE
    disturb(server, build)
    sync(engine, 3)
    assert received(server) == WHOLE
    sync(engine, 4)
    assert received(server) == ALONE


def test_a_server_without_room_gets_merged_weights_and_is_told_of_once(
    serve: Serve, build: Build, adapters: Adapters
) -> None:
    notices: list[str] = []
    small, large = serve(max_lora_rank=1), serve(max_lora_rank=8)
    engine = build(small, large, adapters=adapters, on_notice=notices.append)
    for version in (1, 2):
        sync(engine, version)
        assert received(small) == received(large) == {name for name, _ in MERGED}
    generate(engine, many(2))
    assert all("model" not in body for path, body in small.calls + large.calls if path == "/v1/completions")
    small.stop()
    sync(engine, 3)
    assert received(large) == WHOLE, "what it has is merged"
    notice = notices[0]
    assert sum("merged" in line for line in notices) == 1
    assert notice.startswith(f"vLLM server {small.url}: it takes adapters up to rank 1; those of this run have rank 2")
