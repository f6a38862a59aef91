"""The gate before vLLM's HTTP server: who may ask, for what, and how much; and what the trainer wants to know of the weights.

vLLM's own key guards a part of its routes only. Here nothing passes but a short list of routes, each with the token if there is one.
This module knows neither vLLM nor a web framework: it speaks ASGI.
"""

import asyncio
import hmac
import json
import uuid
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

from grpo_cli.errors import TrainingError
from grpo_cli.recipe.addresses import is_loopback, split_url
from grpo_cli.rollout.vllm.limits import AFTER_IMAGES, AFTER_TEXT, Limits

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

STATUS = "/grpo/status"
OPEN = "/health"
"""Needs no token: it says only whether the engine is alive."""
ROUTES = {
    OPEN: "GET",
    STATUS: "GET",
    AFTER_TEXT: "POST",
    AFTER_IMAGES: "POST",
    "/pause": "POST",
    "/resume": "POST",
    "/init_weight_transfer_engine": "POST",
    "/start_weight_update": "POST",
    "/update_weights": "POST",
    "/finish_weight_update": "POST",
    "/reset_prefix_cache": "POST",
    # Not for the trainer: for people who look what runs here, and for dashboards.
    "/v1/models": "GET",
    "/version": "GET",
    "/metrics": "GET",
}
"""Every route that exists here, with its method."""


class Engine(Protocol):
    """What stands behind the gate."""

    def description(self, scope: Scope) -> dict[str, Any]:
        """Give what does not change: all of `ServerStatus` but what the gate knows itself."""
        ...

    async def complete(self, scope: Scope, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Complete a prompt with images; stop when cancelled.

        Raises:
            TrainingError: If that cannot be done as it is asked.
        """
        ...

    async def settle(self, scope: Scope) -> None:
        """Do what is left to do when an update has ended, before its weights are used."""
        ...

    async def checksum(self, scope: Scope) -> str | None:
        """Give the checksum of the weights that came last; None: it is not known."""
        ...


@dataclass(kw_only=True, slots=True)
class _Weights:
    """What passed the gate tells: it can be asked while the engine is at work, and nothing else can change it."""

    instance: str
    policy_version: int | str | None = None
    checksum: str | None = None
    paused: bool = False


class _Refusal(Exception):  # noqa: N818  an answer, not a failure of ours
    """The request gets an answer right here."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class _Gone(Exception):  # noqa: N818
    """The client left before its request was complete."""


class Gate:
    """ASGI middleware that lets only bounded, known and authorized requests through.

    Args:
        app: What it protects.
        token: What requests must bear; None: nobody is asked.
        limits: Of a request.
        engine: Behind it.
        instance: What to call this start of it; None: a new name.
    """

    def __init__(
        self, app: Application, *, token: str | None, limits: Limits, engine: Engine, instance: str | None = None
    ) -> None:
        self._app = app
        self._bearer = None if token is None else f"Bearer {token}".encode()
        self._limits = limits
        self._engine = engine
        self._weights = _Weights(instance=instance or uuid.uuid4().hex)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or hand over."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            try:
                await self._serve(scope, receive, send)
            except _Refusal as refusal:
                # The rest of the body is not read, so the connection cannot be used again.
                await _answer(send, refusal.status, _error(refusal), close=True)
            except _Gone:
                pass
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._admit(scope)
        if scope["path"] == STATUS:
            await _answer(send, 200, self._engine.description(scope) | self._known())
        elif scope["method"] == "GET":
            await self._app(scope, receive, send)
        else:
            body = await self._read(scope, receive)
            if scope["path"] == AFTER_IMAGES:
                await _answer(send, 200, await self._complete(scope, self._bounded(body), receive))
                return
            if scope["path"] == AFTER_TEXT:
                self._bounded(body)
            await self._app(scope, _replay(body, receive), self._noting(scope, body, send))

    async def _complete(self, scope: Scope, asked: Mapping[str, Any], receive: Receive) -> dict[str, Any]:
        """Have a prompt with images completed, for as long as the client waits for it."""
        work, leaving = asyncio.ensure_future(self._engine.complete(scope, asked)), asyncio.ensure_future(receive())
        try:
            await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise _Gone
            return work.result()
        except TrainingError as error:
            hint = "" if error.hint is None else f" ({error.hint})"
            raise _Refusal(400, f"{error.message}{hint}") from error
        finally:
            work.cancel()
            leaving.cancel()

    def _known(self) -> dict[str, Any]:
        weights = self._weights
        return {
            "instance": weights.instance,
            "policy_version": weights.policy_version,
            "checksum": weights.checksum,
            "paused": weights.paused,
            "max_num_generations": self._limits.max_num_generations,
            "max_body_bytes": self._limits.max_body_bytes,
        }

    def _admit(self, scope: Scope) -> None:
        """Check sender, token, route and method, in this order: without the token, one does not learn what there is."""
        path, method = scope["path"], scope["method"]
        self._refuse_browsers(scope)
        bearer = None if (path, method) == (OPEN, ROUTES[OPEN]) else self._bearer
        if bearer is not None and not hmac.compare_digest(_only(scope, b"authorization"), bearer):
            raise _Refusal(401, "the token is missing or wrong; send it as `Authorization: Bearer TOKEN`")
        if path not in ROUTES:
            raise _Refusal(404, f"there is no {path} here")
        if method != ROUTES[path]:
            raise _Refusal(405, f"{path} takes {ROUTES[path]}, not {method}")

    def _refuse_browsers(self, scope: Scope) -> None:
        """Refuse what web pages have a browser on this machine ask, which reaches loopback addresses as every local program does."""
        if any(name == b"origin" for name, _ in scope["headers"]):
            raise _Refusal(403, "browsers are not served: the request has an Origin")
        if self._bearer is not None:  # no page knows it
            return
        # A page whose own name was made to lead here needs no Origin to read; its name is in Host.
        host = _only(scope, b"host").decode("latin-1")
        parts = split_url(f"//{host}")
        if parts is None or not is_loopback(parts.hostname or ""):
            raise _Refusal(403, f"without a token only localhost is served, not the host {host!r}")

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        """Read a body, but never more than is allowed."""
        limit = self._limits.max_body_bytes
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
        if declared.isdigit() and int(declared) > limit:
            raise _Refusal(413, f"the request has {int(declared):,} bytes; allowed: {limit:,} (--max-body-mib)")
        body = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Gone
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > limit:
                raise _Refusal(413, f"the request has more than {limit:,} bytes (--max-body-mib)")
        return bytes(body)

    def _bounded(self, body: bytes) -> Mapping[str, Any]:
        """Read a body; refuse more than one prompt and too many completions. vLLM reads the same JSON, some of it with more good will."""
        try:
            asked = json.loads(body)
        except (ValueError, RecursionError):
            asked = None
        if not isinstance(asked, dict):
            raise _Refusal(400, "the body cannot be read; allowed: a JSON object")
        prompt, number, limit = asked.get("prompt"), asked.get("n"), self._limits.max_num_generations
        if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
            raise _Refusal(400, "prompt: allowed: one prompt, as a list of token ids")
        # vLLM would take "8" and 8.0 for 8, so only what is a number here can be compared here.
        if number is not None and (type(number) is not int or number > limit):
            raise _Refusal(400, f"n is {number!r}; allowed: up to {limit} (--max-num-generations)")
        return asked

    def _noting(self, scope: Scope, body: bytes, send: Send) -> Send:
        """Keep what the engine's answer says of pauses and weights."""
        weights, path = self._weights, scope["path"]
        if path == "/start_weight_update":  # whatever comes of it, the old weights may be gone
            weights.policy_version = weights.checksum = None

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                if path == "/pause":
                    weights.paused = True
                elif path == "/resume":
                    weights.paused = False
                elif path == "/finish_weight_update":
                    await self._engine.settle(scope)
                    weights.policy_version = _version(body)
                    weights.checksum = await self._engine.checksum(scope)
            await send(message)

        return noting


def _only(scope: Scope, name: bytes) -> bytes:
    """Give the value of a header that is there once, else nothing."""
    values: list[bytes] = [value for header, value in scope["headers"] if header == name]
    return values[0] if len(values) == 1 else b""


def _version(body: bytes) -> int | str | None:
    """Read the version that `/finish_weight_update` was given; vLLM takes it as text."""
    try:
        asked = json.loads(body)
    except ValueError:
        return None
    version = asked.get("weight_version") if isinstance(asked, dict) else None
    return int(version) if isinstance(version, str) and version.isdecimal() else version


def _replay(body: bytes, receive: Receive) -> Receive:
    """Give a body that was read once more, and then what else comes: the client's leaving."""
    given = False

    async def replaying() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replaying


def _error(refusal: _Refusal) -> dict[str, Any]:
    """Form an error as vLLM does."""
    return {"error": {"message": refusal.message, "type": "grpo vllm-serve", "code": refusal.status}}


async def _answer(send: Send, status: int, content: dict[str, Any], *, close: bool = False) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if close:
        headers.append((b"connection", b"close"))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
