"""The gate, before a small ASGI application of our own: what gets through, and what it keeps of what passed."""

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import httpx
import pytest

from grpo_cli.rollout.vllm.limits import AFTER_IMAGES, AFTER_TEXT, Limits
from grpo_cli.rollout.vllm.middleware import ROUTES, STATUS, Gate, Message, Receive, Scope, Send

TOKEN = "correct-horse"
MAX_BODY_BYTES = 1000
MAX_NUM_GENERATIONS = 8
CLOSED = (
    "/", "/docs", "/openapi.json", "/collective_rpc", "/sleep", "/wake_up", "/invocations", "/ping", "/tokenize", "/server_info",
    "/v1/chat/completions", "/v1/load_lora_adapter", "/inference/v1/generate", "/update_weight_version", "/weight_checker",
    "/is_paused", "/weight_info", "/get_world_size", "/shutdown_weight_transfer_engine", "/abort_requests", "/v1/completions/", "//v1/completions", "/V1/completions", "/pause/../sleep",
)  # fmt: skip
LOCAL = [(b"host", b"127.0.0.1:8000")]
ONE_PROMPT = b'{"prompt": [1, 2]}'


class Inner:
    """Echoes what it is asked; its engine can be told what to answer."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, bytes]] = []
        self.status = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            more = message["more_body"]
        self.asked.append((scope["method"], scope["path"], body))
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": body})


class Weights:
    """The engine behind the gate."""

    async def complete(self, scope: Scope, asked: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        return {"choices": []}

    async def settle(self, scope: Scope) -> None:
        """There is nothing to do."""

    async def checksum(self, scope: Scope) -> str | None:  # noqa: ARG002  as in the protocol
        return "abc"

    def description(self, scope: Scope) -> dict[str, Any]:  # noqa: ARG002
        return {"model": "tiny"}


def gate(inner: Inner, token: str | None = None) -> Gate:
    limits = Limits(max_body_bytes=MAX_BODY_BYTES, max_num_generations=MAX_NUM_GENERATIONS)
    return Gate(inner, token=token, limits=limits, engine=Weights())


def ask(app: Gate, *requests: tuple[str, str], **options: Any) -> list[httpx.Response]:
    """Make requests one after another."""

    async def asking() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8000") as client:
            return [await client.request(method, path, **options) for method, path in requests]

    return asyncio.run(asking())


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.mark.parametrize("path", [path for path in ROUTES if path not in (STATUS, AFTER_IMAGES)])
def test_every_listed_route_passes_without_a_token_where_none_is_set(path: str) -> None:
    inner = Inner()
    content = ONE_PROMPT if path == AFTER_TEXT else b""
    (answer,) = ask(gate(inner), (ROUTES[path], path), content=content)
    assert answer.status_code == 200
    assert inner.asked == [(ROUTES[path], path, content)]


@pytest.mark.parametrize("path", [*ROUTES, *CLOSED])
@pytest.mark.parametrize("headers", [{}, bearer("wrong"), bearer(""), {"Authorization": TOKEN}, bearer(TOKEN + "x")])
def test_nothing_but_health_passes_without_the_right_token(path: str, headers: dict[str, str]) -> None:
    inner = Inner()
    (answer,) = ask(gate(inner, TOKEN), (ROUTES.get(path, "GET"), path), headers=headers)
    if path == "/health":
        assert answer.status_code == 200
    else:
        assert answer.status_code == 401
        assert inner.asked == []
        assert TOKEN not in answer.text


@pytest.mark.parametrize("path", list(ROUTES))
def test_the_right_token_opens_every_route(path: str) -> None:
    (answer,) = ask(gate(Inner(), TOKEN), (ROUTES[path], path), headers=bearer(TOKEN), content=ONE_PROMPT)
    assert answer.status_code == 200


@pytest.mark.parametrize("path", list(ROUTES))
@pytest.mark.parametrize("token", [None, TOKEN])
@pytest.mark.parametrize("origin", ["http://example.org", "http://127.0.0.1:8000", "null", ""])
def test_a_request_of_a_web_page_is_refused(path: str, token: str | None, origin: str) -> None:
    inner = Inner()
    headers = {"Origin": origin} | ({} if token is None else bearer(token))
    (answer,) = ask(gate(inner, token), (ROUTES[path], path), headers=headers, content=ONE_PROMPT)
    assert (answer.status_code, inner.asked) == (403, [])


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("localhost:8000", 200),
        ("LOCALHOST", 200),
        ("[::1]:8000", 200),
        ("example.org", 403),
        ("example.org:8000", 403),
        ("127.0.0.1.example.org", 403),
        ("localhost@example.org", 403),
        ("10.0.0.7:8000", 403),
        ("127.0.0.1:x", 403),
        ("", 403),
    ],
)
def test_without_a_token_a_name_that_was_made_to_lead_here_is_refused(host: str, status: int) -> None:
    inner = Inner()
    asked = [("POST", "/resume"), ("GET", "/health"), ("GET", "/metrics")]
    assert [answer.status_code for answer in ask(gate(inner), *asked, headers={"Host": host})] == [status] * 3
    assert len(inner.asked) == (3 if status == 200 else 0)
    told = bearer(TOKEN) | {"Host": host}
    assert [answer.status_code for answer in ask(gate(Inner(), TOKEN), *asked, headers=told)] == [200] * 3


@pytest.mark.parametrize("headers", [[], [("Host", "localhost"), ("Host", "example.org")]])
def test_a_request_has_one_host(headers: list[tuple[str, str]]) -> None:
    inner = Inner()
    assert send_as_it_is(gate(inner), "POST", "/resume", [(k.lower().encode(), v.encode()) for k, v in headers]) == 403
    assert inner.asked == []


def test_two_authorization_headers_are_none() -> None:
    headers = [("Authorization", "Bearer wrong"), ("Authorization", f"Bearer {TOKEN}")]
    (answer,) = ask(gate(Inner(), TOKEN), ("GET", "/version"), headers=headers)
    assert answer.status_code == 401


def test_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    compare = hmac.compare_digest

    def spy(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", spy)
    ask(gate(Inner(), TOKEN), ("GET", "/version"), headers=bearer("wrong"))
    assert compared == [(b"Bearer wrong", f"Bearer {TOKEN}".encode())]


def send_as_it_is(app: Gate, method: str, path: str, headers: list[tuple[bytes, bytes]]) -> int:
    """Give the status of the answer. A client would tidy up path and headers."""

    async def asking() -> list[Message]:
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        await app({"type": "http", "method": method, "path": path, "headers": headers}, receive, send)
        return sent

    status: int = asyncio.run(asking())[0]["status"]
    return status


@pytest.mark.parametrize("path", CLOSED)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_every_other_route_does_not_exist(path: str, method: str) -> None:
    inner = Inner()
    assert send_as_it_is(gate(inner), method, path, LOCAL) == 404
    assert inner.asked == []


def test_a_route_takes_its_own_method_only() -> None:
    inner = Inner()
    answers = ask(gate(inner), ("GET", "/pause"), ("POST", "/health"), ("DELETE", "/v1/models"), ("OPTIONS", "/resume"))
    assert [answer.status_code for answer in answers] == [405] * 4
    assert inner.asked == []


def test_websockets_are_closed_and_start_up_events_pass() -> None:
    passed: list[str] = []

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        passed.append(scope["type"])

    async def asking() -> list[Message]:
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        async def receive() -> Message:
            raise AssertionError("nobody asks")

        limits = Limits(max_body_bytes=1, max_num_generations=1)
        app = Gate(inner, token=None, limits=limits, engine=Weights())
        await app({"type": "websocket", "path": "/v1/realtime", "headers": []}, receive, send)
        await app({"type": "lifespan"}, receive, send)
        return sent

    assert asyncio.run(asking()) == [{"type": "websocket.close", "code": 1008}]
    assert passed == ["lifespan"]


def test_a_body_up_to_the_limit_arrives_whole_and_a_longer_one_is_refused() -> None:
    inner = Inner()
    whole = bytes(range(256)) * 3
    (answer,) = ask(gate(inner), ("POST", "/update_weights"), content=whole)
    assert (answer.status_code, answer.content) == (200, whole)
    (answer,) = ask(gate(inner), ("POST", "/update_weights"), content=b"x" * MAX_BODY_BYTES)
    assert answer.status_code == 200
    (answer,) = ask(gate(inner), ("POST", "/update_weights"), content=b"x" * (MAX_BODY_BYTES + 1))
    assert answer.status_code == 413
    assert f"allowed: {MAX_BODY_BYTES:,}" in answer.json()["error"]["message"]
    assert len(inner.asked) == 2


@pytest.mark.parametrize("path", [path for path in ROUTES if ROUTES[path] == "POST"])
def test_a_chunked_body_is_not_read_beyond_the_limit(path: str) -> None:
    """A declared length would be refused at once; this one has none."""
    sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(1000):
            sent += 100
            yield b"x" * 100

    inner = Inner()
    (answer,) = ask(gate(inner), ("POST", path), content=chunks())
    assert answer.status_code == 413
    assert sent == MAX_BODY_BYTES + 100
    assert inner.asked == []


def test_a_chunked_body_within_the_limit_arrives_whole() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for index in range(9):
            yield bytes([index]) * 100

    (answer,) = ask(gate(Inner()), ("POST", "/update_weights"), content=chunks())
    assert answer.content == b"".join(bytes([index]) * 100 for index in range(9))


@pytest.mark.parametrize("number", [1, MAX_NUM_GENERATIONS, None])
def test_as_many_completions_as_allowed_pass(number: int | None) -> None:
    body = {"prompt": [1, 2], "n": number}
    (answer,) = ask(gate(Inner()), ("POST", "/v1/completions"), json=body)
    assert answer.status_code == 200
    assert answer.json() == body


@pytest.mark.parametrize("path", [AFTER_TEXT, AFTER_IMAGES])
@pytest.mark.parametrize("number", [MAX_NUM_GENERATIONS + 1, 10**9, "9", "2", 9.0, 1e300, True, [9]])
def test_more_completions_or_what_vllm_may_read_as_more_are_refused(number: Any, path: str) -> None:
    inner = Inner()
    (answer,) = ask(gate(inner), ("POST", path), json={"prompt": [1, 2], "n": number})
    assert answer.status_code == 400
    assert f"allowed: up to {MAX_NUM_GENERATIONS}" in answer.json()["error"]["message"]
    assert inner.asked == []


def test_the_last_of_two_equal_keys_counts_as_in_vllm() -> None:
    (answer,) = ask(gate(Inner()), ("POST", "/v1/completions"), content=b'{"prompt": [1], "n": 1, "n": 1000}')
    assert answer.status_code == 400


@pytest.mark.parametrize("prompt", ["text", [], [[1, 2]], [[1], [2]], ["a", "b"], [1, "2"], [1, True], [1.0], {}, None])
def test_a_prompt_is_one_list_of_token_ids(prompt: Any) -> None:
    inner = Inner()
    (answer,) = ask(gate(inner), ("POST", "/v1/completions"), json={"prompt": prompt})
    if prompt == []:  # vLLM has an error of its own for no tokens
        assert answer.status_code == 200
    else:
        assert answer.status_code == 400
        assert "allowed: one prompt, as a list of token ids" in answer.json()["error"]["message"]
        assert inner.asked == []


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b"\xff\xfe", b"null", b"[" * 990, b'{"a":' * 190, b'{"prompt": [' + b"9" * 900],
    ids=["nothing", "half", "list", "no text", "null", "deep lists", "deep objects", "half a number"],
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    inner = Inner()
    (answer,) = ask(gate(inner), ("POST", "/v1/completions"), content=body)
    assert (answer.status_code, inner.asked) == (400, [])


@pytest.mark.parametrize("prompt", ["[" * 100_000 + "]" * 100_000, "[" + "9" * 100_000 + "]"], ids=["deep", "long"])
def test_json_that_python_gives_up_on_is_refused(prompt: str) -> None:
    inner = Inner()
    app = Gate(inner, token=None, limits=Limits(max_body_bytes=1 << 20, max_num_generations=1), engine=Weights())
    (answer,) = ask(app, ("POST", "/v1/completions"), content=f'{{"prompt": {prompt}}}')
    assert (answer.status_code, inner.asked) == (400, [])


def test_a_client_that_leaves_while_it_is_served_is_noticed_behind_the_gate() -> None:
    """vLLM stops sampling for a client that is gone; for that the gate must pass on what comes after the body."""
    seen: list[str] = []

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend([(await receive())["type"], (await receive())["type"]])

    async def asking() -> None:
        messages: Iterator[Message] = iter(
            [{"type": "http.request", "body": ONE_PROMPT, "more_body": False}, {"type": "http.disconnect"}]
        )

        async def receive() -> Message:
            return next(messages)

        async def send(message: Message) -> None:
            raise AssertionError("nobody is there")

        app = Gate(inner, token=None, limits=Limits(max_body_bytes=100, max_num_generations=1), engine=Weights())
        await app({"type": "http", "method": "POST", "path": "/v1/completions", "headers": LOCAL}, receive, send)

    asyncio.run(asking())
    assert seen == ["http.request", "http.disconnect"]


def status(app: Gate) -> dict[str, Any]:
    (answer,) = ask(app, ("GET", STATUS))
    found: dict[str, Any] = answer.json()
    return found


def test_status_follows_pauses_and_weights() -> None:
    app = gate(Inner())
    first = status(app)
    assert first == {
        "model": "tiny", "instance": first["instance"], "policy_version": None, "checksum": None, "paused": False,
        "max_num_generations": MAX_NUM_GENERATIONS, "max_body_bytes": MAX_BODY_BYTES,
    }  # fmt: skip
    ask(app, ("POST", "/pause"))
    assert status(app)["paused"]
    ask(app, ("POST", "/start_weight_update"), ("POST", "/update_weights"))
    assert status(app)["policy_version"] is None
    ask(app, ("POST", "/finish_weight_update"), json={"weight_version": "7"})
    assert status(app) == first | {"policy_version": 7, "checksum": "abc", "paused": True}
    ask(app, ("POST", "/resume"))
    assert status(app) == first | {"policy_version": 7, "checksum": "abc"}
    ask(app, ("POST", "/start_weight_update"))
    assert status(app) == first
    assert status(gate(Inner()))["instance"] != first["instance"]


def test_a_failed_call_changes_nothing_but_that_old_weights_are_gone() -> None:
    inner = Inner()
    app = gate(inner)
    ask(app, ("POST", "/finish_weight_update"), json={"weight_version": "7"})
    inner.status = 500
    ask(app, ("POST", "/pause"))
    ask(app, ("POST", "/finish_weight_update"), json={"weight_version": "8"})
    assert (status(app)["paused"], status(app)["policy_version"]) == (False, 7)
    ask(app, ("POST", "/start_weight_update"))
    assert status(app)["policy_version"] is None


def test_refusals_are_json_and_end_the_connection() -> None:
    (answer,) = ask(gate(Inner(), TOKEN), ("GET", "/docs"))
    assert json.loads(answer.content)["error"]["code"] == 401
    assert answer.headers["connection"] == "close"
    assert answer.headers["www-authenticate"] == "Bearer"
