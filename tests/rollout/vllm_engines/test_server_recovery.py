"""Servers that are lost and come back, and servers that are not those of the run: over real sockets."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from protocol_server import ProtocolServer
from torch import Tensor

from grpo_cli import __version__
from grpo_cli.errors import GrpoError, ModelError, TrainingError
from grpo_cli.rollout.engine import EngineLostError, RevivableEngine
from grpo_cli.rollout.sync.transports import SharedMemoryTransport
from grpo_cli.rollout.vllm.client import VllmClient
from grpo_cli.rollout.vllm.fit import Needs
from grpo_cli.rollout.vllm.server_engine import ServerEngine
from grpo_cli.types import PolicyVersion, Prompt, PromptId, Sampling

WEIGHTS: list[tuple[str, Tensor]] = [(f"layer.{number}", torch.full((8, 5), float(number))) for number in range(4)]
PROMPTS = [Prompt(uid=PromptId("0:0"), ids=(65, 66), text="", messages=None, row={})]
SAMPLING = Sampling(stop_ids=(257,), max_tokens=5)
VERSION = PolicyVersion(3)


@contextmanager
def engine_for(*servers: ProtocolServer, tokenizer: Any, **settings: Any) -> Iterator[ServerEngine]:
    engine = ServerEngine(
        [VllmClient(server.url, connect_timeout=20.0, request_timeout=90.0) for server in servers],
        tokenizer,
        transport=SharedMemoryTransport(),
        bucket_bytes=256,
        dtype=None,
        **settings,
    )
    try:
        yield engine
    finally:
        engine.close()


def sampled(engine: ServerEngine) -> list[tuple[int, ...]]:
    (group,) = engine.generate(PROMPTS, SAMPLING, num_generations=2, seed_key=(0, "train", 3))
    return [completion.ids for completion in group.completions]


@pytest.mark.parametrize("how", ["ended", "engine dead", "restarted"])
def test_what_was_lost_gives_the_same_completions_after_it_came_back(how: str, tokenizer: Any) -> None:
    lines: list[str] = []
    with (
        ProtocolServer() as server,
        engine_for(server, tokenizer=tokenizer, on_notice=lines.append, server_timeout=20) as engine,
    ):
        assert isinstance(engine, RevivableEngine)
        engine.sync(WEIGHTS, VERSION)
        before = sampled(engine)
        server.restart()
        if how != "restarted":
            server.always["/health"] = 503 if how == "engine dead" else "drop"
        began = time.monotonic()
        with pytest.raises(EngineLostError) as caught:
            sampled(engine)
        assert time.monotonic() - began < 30
        if how != "restarted":
            del server.always["/health"]
            server.faults["/health"].extend([503, 503])  # it is starting
        engine.revive(caught.value)
        assert lines[0].startswith(f"vLLM server {server.url}: ")
        assert "start it again if it has ended" in lines[0]
        assert any("waiting for vLLM server" in line for line in lines) == (how != "restarted")
        engine.sync(WEIGHTS, VERSION)
        assert sampled(engine) == before


def test_one_of_several_servers_is_enough_to_go_on(tokenizer: Any) -> None:
    with (
        ProtocolServer() as gone,
        ProtocolServer() as back,
        engine_for(gone, back, tokenizer=tokenizer, server_timeout=20) as engine,
    ):
        engine.sync(WEIGHTS, VERSION)
        before = sampled(engine)
        gone.always["/health"] = back.always["/health"] = 503
        with pytest.raises(EngineLostError) as caught:
            sampled(engine)
        del back.always["/health"]
        engine.revive(caught.value)
        engine.sync(WEIGHTS, VERSION)
        assert sampled(engine) == before


def test_waiting_for_one_that_does_not_come_back_has_an_end(tokenizer: Any) -> None:
    with ProtocolServer() as server, engine_for(server, tokenizer=tokenizer, server_timeout=0.3) as engine:
        server.always["/health"] = 503
        with pytest.raises(TrainingError, match=r"waited 0.3 s \(vllm.server_timeout\)"):
            engine.revive(EngineLostError("it ended"))


def test_a_server_lost_in_a_sync_is_lost_and_one_that_refuses_is_not(tokenizer: Any) -> None:
    with ProtocolServer() as server, engine_for(server, tokenizer=tokenizer) as engine:

        def dies(_: Any) -> Any:
            server.always["/health"] = 503
            return {"error": {"message": "the engine is dead"}}

        server.always["/update_weights"] = 500
        with pytest.raises(TrainingError, match="did not take the weights of step 3") as refused:
            engine.sync(WEIGHTS, VERSION)
        assert not isinstance(refused.value, EngineLostError)
        server.always["/update_weights"] = "drop"
        server.faults["/start_weight_update"].append(dies)
        with pytest.raises(
            EngineLostError, match=rf"{server.url}: GET /health: 503.*did not take the weights of step 3"
        ):
            engine.sync(WEIGHTS, VERSION)


def test_a_server_that_is_restarted_in_a_sync_is_lost_though_it_answers(tokenizer: Any) -> None:
    with (
        ProtocolServer() as sound,
        ProtocolServer() as server,
        engine_for(sound, server, tokenizer=tokenizer) as engine,
    ):

        def restart(_: Any) -> Any:
            server.restart()
            return b"broken"

        server.faults["/finish_weight_update"].append(restart)
        server.always["/finish_weight_update"] = 500
        with pytest.raises(
            EngineLostError, match=rf"^vLLM server {server.url}: it was restarted \(.*POST /[a-z_]*_weight.*: 500"
        ):
            engine.sync(WEIGHTS, VERSION)
        server.always.clear()
        assert engine.sync(WEIGHTS, VERSION).version == VERSION


@pytest.mark.parametrize("path", ["/pause", "/update_weights", "/v1/completions"])
def test_an_engine_that_dies_and_leaves_a_request_without_an_answer_is_noticed(path: str, tokenizer: Any) -> None:
    """As vLLM does: its engine's death ends completions, but not what waits for the engine's workers."""

    def sample_and_sync(engine: ServerEngine) -> None:
        sampled(engine)
        engine.sync(WEIGHTS, VERSION)

    with ProtocolServer() as server, engine_for(server, tokenizer=tokenizer) as engine:
        engine.sync(WEIGHTS, VERSION)

        def dies(right: Any) -> Any:
            server.always["/health"] = 503
            time.sleep(40)
            return right

        server.always[path] = dies
        began = time.monotonic()
        with pytest.raises(EngineLostError, match=r"GET /health: 503, .* \(its engine is dead, or not ready\)"):
            sample_and_sync(engine)
        assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("needs", "said", "hint"),
    [
        (
            Needs(model="big", sizes={"vocab_size": 300}),
            "it serves tiny, whose vocab_size is 264; that of big, which is trained here, is 300",
            "grpo vllm-serve RECIPE",
        ),
        (
            Needs(model="big", sizes={"num_hidden_layers": 9, "hidden_size": 64}),
            "it serves tiny, whose hidden_size is 32; that of big, which is trained here, is 64",
            "grpo vllm-serve RECIPE",
        ),
        (
            Needs(dtype="bfloat16"),
            "it computes in float32, but this run counts on bfloat16 (vllm.dtype)",
            "--dtype bfloat16",
        ),
    ],
)
def test_a_server_of_something_else_is_told_in_a_line(needs: Needs, said: str, hint: str, tokenizer: Any) -> None:
    with ProtocolServer() as server, engine_for(server, tokenizer=tokenizer, needs=needs) as engine:
        with pytest.raises(ModelError) as first:
            engine.wait_until_ready(5)
        with pytest.raises(ModelError) as later:
            engine.revive(EngineLostError("it ended"))
        assert first.value.message == later.value.message == f"vLLM server {server.url}: {said}"
        assert hint in str(first.value.hint)


@pytest.mark.parametrize("version", ["0.0.7", None])
def test_a_server_of_another_version_is_told_in_a_line(version: str | None, tokenizer: Any) -> None:
    def older(right: dict[str, Any]) -> dict[str, Any]:
        status = {name: value for name, value in right.items() if name not in ("grpo", "sizes")}
        return status if version is None else status | {"grpo": version}

    with ProtocolServer() as server, engine_for(server, tokenizer=tokenizer) as engine:
        server.always["/grpo/status"] = older
        with pytest.raises(GrpoError) as caught:
            engine.wait_until_ready(5)
        of = "of an unknown version" if version is None else version
        assert caught.value.message == f"vLLM server {server.url}: it is of grpo {of}, this is grpo {__version__}"
        assert caught.value.exit_code == 4
