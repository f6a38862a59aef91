"""HTTP to one `grpo vllm-serve`: what the trainer asks of it, in types, and one line for each way in which it can fail.

Calls are repeated when the connection broke and doing them twice is the same as doing them once. Weights are never sent twice
here: whoever sends them begins anew as a whole.
"""

import asyncio
import base64
import errno
import json
import os
import ssl
import time
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from http import HTTPStatus
from typing import Any, Self

import httpx
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from grpo_cli import __version__
from grpo_cli.errors import TrainingError, causes
from grpo_cli.rollout.engine import EngineLostError
from grpo_cli.rollout.vllm.completion import SampledTokens
from grpo_cli.rollout.vllm.limits import AFTER_IMAGES, AFTER_TEXT
from grpo_cli.types import FinishReason, PolicyVersion

_ATTEMPTS = 3
_KEPT_ALIVE_SECONDS = 2.0
"""A connection that idles longer is not used again: vLLM closes it after 5, perhaps just when a request is on its way."""
_ALONE = {"connection": "close"}
"""Of calls that may fail by design: vLLM closes a connection after an error without a word, perhaps just when the next call uses it."""
_JSON = {"content-type": "application/json"}
_LOOK_SECONDS = 2.0
"""Between two looks at whether a server that has not answered yet still has an engine."""
_LONGEST_ANSWER = 300
"""Characters of a server's answer that are shown."""


class ServerError(EngineLostError):
    """A server cannot do what it was asked, now or ever; another one may, or this one when it was started again."""


class ServerTimeoutError(ServerError):
    """A server did not answer in time. It may still be at work: to ask it once more would take as long again."""


class _NoConnectionError(ServerTimeoutError):
    """A server did not even take the request."""


class _BrokenConnectionError(ServerError):
    """There was no connection, or it ended before the answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerStatus:
    """What a server says of itself.

    Attributes:
        instance: Names one start of it: another one after a restart.
        policy_version: Of the weights it samples from; None if it got none since it started.
        checksum: Of those weights as they came; None likewise.
        paused: Whether it samples nothing at present.
        world_size: Processes that hold weights.
        max_model_len: Longest prompt and completion together, in tokens.
        max_num_seqs: Completions that it samples at once.
        max_num_generations: Most completions of one prompt in one request.
        max_body_bytes: Longest request.
        max_images: Most images of one prompt; 0: it sees none.
        image_options: Of what prepares them.
        max_lora_rank: Largest rank of adapters; 0: it takes none.
        model: What it calls its model.
        sizes: Of the model, such as `vocab_size`.
        dtype: What it computes in, such as `float32`.
        device: What it computes on, such as `cpu` or `cuda`.
    """

    instance: str
    policy_version: int | None
    checksum: str | None
    paused: bool
    world_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_generations: int
    max_body_bytes: int
    max_images: int
    image_options: Mapping[str, Any]
    max_lora_rank: int
    model: str
    sizes: Mapping[str, int]
    dtype: str
    device: str

    @classmethod
    def from_json(cls, answer: Any) -> Self:
        """Read the answer of `/grpo/status`.

        Raises:
            ValueError: If it is none.
        """
        try:
            return cls(**{field.name: answer[field.name] for field in fields(cls)})
        except (KeyError, TypeError):
            raise ValueError(f"found {str(answer)[:_LONGEST_ANSWER]}") from None


class VllmClient:
    """Talks to one server. All calls belong to one event loop.

    Every call raises `ServerError` if the server cannot be reached, breaks down or does not answer in time, and `TrainingError`
    if it refuses the request as such; both name the address, what was asked and what was answered.

    Args:
        base_url: Such as `http://127.0.0.1:8000`.
        token: Sent with every request; None: the server wants none.
        connect_timeout: Seconds to wait for a connection, and for an answer that takes no work.
        request_timeout: Seconds to wait for any other answer.

    Attributes:
        base_url: See above.
    """

    def __init__(
        self, base_url: str, token: str | None = None, *, connect_timeout: float, request_timeout: float
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._quick, self._slow = connect_timeout, request_timeout
        self._look: asyncio.Future[None] | None = None
        self._looked = 0.0
        self._http = httpx.AsyncClient(
            base_url=self.base_url,
            headers={} if token is None else {"Authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(None, connect=connect_timeout),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_KEPT_ALIVE_SECONDS),
            # The environment's proxies lead out of the network, where no such server is; its certificates are read here.
            trust_env=False,
            verify=ssl.create_default_context(),
        )

    async def status(self) -> ServerStatus:
        """Ask for the server's state; it answers while it samples."""
        answer = await self._repeat("GET", "/grpo/status", quick=True)
        try:
            said = _json(answer)
            self._check_version(said)
            return ServerStatus.from_json(said)
        except ValueError as error:
            raise self._foreign(f"/grpo/status: {error}") from None

    async def healthy(self) -> None:
        """Return if the engine behind the server is alive."""
        await self._repeat("GET", "/health", quick=True)

    async def completions(self, body: Mapping[str, Any], *, max_bytes: int) -> list[SampledTokens]:
        """Complete one prompt.

        Args:
            body: Of `/v1/completions`; with images, what `ImagePrompt.request` says besides. `n` completions are asked for, with
                log-probabilities.
            max_bytes: Longest request that the server takes. It would leave the line in the middle of a longer one.

        Returns:
            `n` completions in the order of their index.

        Raises:
            TrainingError: Also if the request is too long, or the server is alive and takes too long: it, or another, would take as long
                again.
        """
        path = AFTER_IMAGES if "images" in body else AFTER_TEXT
        asked = {**body, "return_token_ids": True, "return_tokens_as_token_ids": True}
        content = json.dumps(asked, separators=(",", ":"), default=_in_base64).encode()
        if len(content) > max_bytes:
            what = f"prompt {body['uid']} with its images" if "images" in body else "a prompt"
            raise TrainingError(
                f"{self}: {what} takes {len(content):,} bytes; allowed: {max_bytes:,}",
                hint="make it smaller, or start the server with a larger --max-body-mib",
            )
        try:
            answer = await self._once("POST", path, content=content, headers=_JSON)
        except _NoConnectionError:
            raise
        except ServerTimeoutError as late:
            await self.healthy()
            await self.status()
            raise TrainingError(
                f"{late.message}, though it is alive",
                hint="raise vllm.request_timeout, or ask for less at once: generation.max_completion_length, grpo.num_generations, "
                "max_num_seqs of the server",
            ) from late
        try:
            choices = sorted(_json(answer)["choices"], key=lambda choice: int(choice["index"]))
            sampled = [_sampled(choice) for choice in choices]
        except (ValueError, KeyError, TypeError) as error:
            why = str(error) if isinstance(error, ValueError) else repr(error)
            raise self._failure(f"POST {path}: an answer that cannot be read: {why}") from None
        if len(sampled) != body["n"]:
            raise self._failure(f"POST {path}: {len(sampled)} completions instead of {body['n']}")
        return sampled

    async def pause(self) -> None:
        """Let it finish what it samples and begin nothing new."""
        await self._repeat("POST", "/pause", params={"mode": "wait"})

    async def resume(self) -> None:
        """Let it sample again."""
        await self._repeat("POST", "/resume")

    async def reset_prefix_cache(self) -> None:
        """Let it forget the keys and values of all prompts."""
        answer = await self._repeat("POST", "/reset_prefix_cache")
        # Earlier versions answer with nothing, and do not say whether they did.
        if answer.content and not _json(answer).get("success", True):
            raise self._failure("POST /reset_prefix_cache: it did not forget the keys and values of old weights")

    async def init_weight_transfer(self, info: Mapping[str, Any]) -> None:
        """Let its processes join the transfer of weights."""
        await self._once("POST", "/init_weight_transfer_engine", json={"init_info": dict(info)})

    async def start_weight_update(self) -> None:
        """Prepare for new weights, whatever came of an earlier update.

        One that never came to its end, because its trainer was killed, goes on for vLLM, which then refuses another; it has no route
        to end it, but an update that fails is over.
        """
        try:
            await self._once("POST", "/start_weight_update", headers=_ALONE)
        except ServerTimeoutError:
            raise
        except ServerError:
            with suppress(TrainingError):
                await self._once("POST", "/update_weights", json={"update_info": {"abandon": True}}, headers=_ALONE)
            await self._once("POST", "/start_weight_update", headers=_ALONE)

    async def update_weights(self, info: Mapping[str, Any]) -> None:
        """Take one bucket of weights."""
        await self._once("POST", "/update_weights", json={"update_info": dict(info)})

    async def finish_weight_update(self, version: PolicyVersion) -> None:
        """Use the weights that came since `start_weight_update`."""
        body = {"weight_version": str(version)}
        await self._once("POST", "/finish_weight_update", json=body)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def _repeat(self, method: str, path: str, **call: Any) -> httpx.Response:
        """Make a call again if its connection broke; for calls that do nothing more the second time."""
        attempts = AsyncRetrying(
            stop=stop_after_attempt(_ATTEMPTS),
            wait=wait_exponential(multiplier=0.1),
            retry=retry_if_exception_type(_BrokenConnectionError),
            reraise=True,
        )
        answer: httpx.Response = await attempts(self._once, method, path, **call)
        return answer

    async def _while_alive(self, request: Coroutine[Any, Any, httpx.Response]) -> httpx.Response:
        """Await an answer for as long as there is an engine to give it: when vLLM's dies, some requests never get one."""
        answer = asyncio.ensure_future(request)
        try:
            while not (await asyncio.wait({answer}, timeout=_LOOK_SECONDS))[0]:
                now = time.monotonic()
                if self._look is None or now - self._looked >= _LOOK_SECONDS:  # one look for all that wait
                    self._look, self._looked = asyncio.ensure_future(self.healthy()), now
                with suppress(ServerTimeoutError):  # it is busy, not dead
                    await asyncio.shield(self._look)
            return answer.result()
        finally:
            answer.cancel()

    async def _once(self, method: str, path: str, *, quick: bool = False, **content: Any) -> httpx.Response:
        """Make a call and check its status code."""
        asked, seconds = f"{method} {path}", self._quick if quick else self._slow
        try:
            async with asyncio.timeout(seconds):
                request = self._http.request(method, path, **content)
                answer = await (request if quick else self._while_alive(request))
        except httpx.ConnectTimeout:
            raise _NoConnectionError(
                f"{self}: {asked}: no connection within {self._quick:g} s (vllm.connect_timeout)"
            ) from None
        except TimeoutError:
            key = "vllm.connect_timeout" if quick else "vllm.request_timeout"
            raise ServerTimeoutError(f"{self}: {asked}: no answer within {seconds:g} s ({key})") from None
        except httpx.HTTPError as error:
            raise _BrokenConnectionError(f"{self}: {asked}: {_reason(error)}") from None
        if answer.is_success:
            return answer
        said = f"{asked}: {answer.status_code}, {_first_line(answer)}"
        if answer.status_code == HTTPStatus.UNAUTHORIZED:
            raise TrainingError(
                f"{self}: {asked}: 401, the token is missing or wrong",
                hint="give the token it was started with: vllm.token_file, or the environment variable GRPO_VLLM_TOKEN",
            )
        if answer.status_code == HTTPStatus.NOT_FOUND:
            raise self._foreign(said)
        if answer.status_code == HTTPStatus.SERVICE_UNAVAILABLE:
            raise self._failure(f"{said} (its engine is dead, or not ready)")
        if answer.is_server_error:
            raise self._failure(said)
        raise TrainingError(f"{self}: {said}")

    def _check_version(self, status: Any) -> None:
        """Refuse a server of another version: what the two say to each other may have changed."""
        is_ours = isinstance(status, dict) and {"instance", "policy_version"} <= status.keys()
        if is_ours and status.get("grpo") != __version__:
            raise TrainingError(
                f"{self}: it is of grpo {status.get('grpo', 'of an unknown version')}, this is grpo {__version__}",
                hint="install the same version on both sides",
            )

    def _failure(self, what: str) -> ServerError:
        return ServerError(f"{self}: {what}")

    def _foreign(self, what: str) -> TrainingError:
        """Say that something else listens there."""
        return TrainingError(f"{self}: it answers, but is no `grpo vllm-serve` ({what})", hint="check host and port")

    def __str__(self) -> str:
        return f"vLLM server {self.base_url}"


def _in_base64(image: bytes) -> str:
    """Write what JSON does not have."""
    return base64.b64encode(image).decode("ascii")


def _sampled(choice: Mapping[str, Any]) -> SampledTokens:
    """Read one completion of an answer."""
    ids = tuple(int(token) for token in choice["token_ids"])
    logps = tuple(choice["logprobs"]["token_logprobs"])
    if not ids or len(ids) != len(logps):
        raise ValueError(f"{len(ids)} tokens with {len(logps)} log-probabilities")
    return SampledTokens(ids=ids, logps=logps, finish_reason=FinishReason(choice["finish_reason"]))


def _json(answer: httpx.Response) -> Any:
    """Parse an answer.

    Raises:
        ValueError: If it is no JSON.
    """
    try:
        return answer.json()
    except ValueError:
        raise ValueError(f"no JSON but {_first_line(answer)!r}") from None


def _first_line(answer: httpx.Response) -> str:
    """Give what an answer says, in one line: the message of vLLM's JSON errors, else its text."""
    try:
        said = answer.json()["error"]
        text = str(said["message"] if isinstance(said, dict) else said)
    except (ValueError, KeyError, TypeError):
        text = answer.text
    line = next((line.strip() for line in text.splitlines() if line.strip()), answer.reason_phrase)
    return line if len(line) <= _LONGEST_ANSWER else line[:_LONGEST_ANSWER] + "..."


def _reason(error: BaseException) -> str:
    """Give the system's own words for why a connection failed, which lie several exceptions deep."""
    reason = str(error).rstrip(".") or type(error).__name__
    for cause in causes(error):
        if isinstance(cause, OSError) and not isinstance(cause, ssl.SSLError) and cause.errno is not None:
            known = cause.errno in errno.errorcode  # a name that does not resolve has a number of its own
            reason = (os.strerror(cause.errno) if known else cause.strerror or reason).lower()
    return reason
