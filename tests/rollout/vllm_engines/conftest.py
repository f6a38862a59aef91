"""Servers and engines that end with the test."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from protocol_server import ProtocolServer
from server_engines import Build, Serve

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
