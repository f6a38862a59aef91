"""Servers and engines that end with the test."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from colocated import LONGEST
from protocol_server import ProtocolServer
from server_engines import Build, Serve
from tiny_models import build_tiny_model

from grpo_cli.rollout.sync.transports import SharedMemoryTransport, WeightTransport
from grpo_cli.rollout.vllm.client import VllmClient
from grpo_cli.rollout.vllm.server_engine import ServerEngine


@pytest.fixture
def held() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def serve(held: ExitStack) -> Serve:
    """Start servers that end with the test."""

    def start(**settings: Any) -> ProtocolServer:
        return held.enter_context(ProtocolServer(**settings))

    return start


@pytest.fixture
def build(held: ExitStack, tokenizer: Any) -> Build:
    """Make engines that are closed with the test."""

    def build(
        *servers: ProtocolServer,
        token: str | None = None,
        request_timeout: float = 20.0,
        transport: WeightTransport | None = None,
        **settings: Any,
    ) -> ServerEngine:
        engine = ServerEngine(
            [
                VllmClient(server.url, token, connect_timeout=20.0, request_timeout=request_timeout)
                for server in servers
            ],
            tokenizer,
            transport=SharedMemoryTransport() if transport is None else transport,
            bucket_bytes=256,
            dtype=None,
            **settings,
        )
        held.callback(engine.close)
        return engine

    return build


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with heads of a size that vLLM has kernels for."""
    return build_tiny_model(tmp_path_factory.mktemp("colocate"), hidden_size=128, initializer_range=0.1)


@pytest.fixture(scope="module")
def arguments(folder: Path) -> dict[str, Any]:
    return {
        "model": str(folder),
        "dtype": "float32",
        "max_model_len": LONGEST,
        "seed": 0,
        "kv_cache_memory_bytes": 1 << 30,
        "enforce_eager": True,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
    }
