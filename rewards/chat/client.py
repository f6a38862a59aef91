"""Asks a chat server: at most so many requests at once and a minute, again after a fault that may pass."""

import asyncio
import contextlib
import email.utils
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import httpx
from aiolimiter import AsyncLimiter
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt
from tenacity.wait import wait_random_exponential

_PASSING = frozenset({408, 409, 425, 429})
"""Codes below 500 after which the same request may succeed."""
_MAX_WAIT_SECONDS = 120.0
_BACKOFF = wait_random_exponential(multiplier=0.5, max=30)


class ChatError(RuntimeError):
    """A chat server did not give a reply."""


class _PassingError(ChatError):
    """It may give one later.

    Args:
        text: What happened.
        seconds: How long the server asks to wait; None if it does not say.
    """

    def __init__(self, text: str, seconds: float | None = None) -> None:
        super().__init__(text)
        self.seconds = seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What a chat server answered.

    Attributes:
        text: Of the first choice.
        num_input_tokens: As the server counts them; 0 if it does not.
        num_output_tokens: Likewise.
    """

    text: str
    num_input_tokens: int
    num_output_tokens: int


class ChatClient:
    """Asks one server.

    Args:
        base_url: Up to and with `/v1`.
        api_key: Sent as bearer token; shown nowhere.
        concurrency: Requests at the same time.
        requests_per_minute: Over all calls; None sets no limit.
        timeout_seconds: For one request.
        max_retries: After faults that may pass: no connection, no answer in time, an answer that is none, the codes 408, 409, 425, 429
            and from 500 on. The wait grows, and is what `Retry-After` says if that is longer.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None,
        concurrency: int,
        requests_per_minute: float | None,
        timeout_seconds: float,
        max_retries: int,
    ) -> None:
        self._url = f"{base_url.rstrip('/')}/chat/completions"
        self._api_key = api_key
        self._concurrency = concurrency
        self._requests_per_minute = requests_per_minute
        self._timeout_seconds = timeout_seconds
        self._max_retries = max_retries
        self._limiter: tuple[asyncio.AbstractEventLoop, AsyncLimiter] | None = None

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator["Connection"]:
        """Keep connections open for the block."""
        headers = {} if self._api_key is None else {"Authorization": f"Bearer {self._api_key}"}
        async with httpx.AsyncClient(headers=headers, timeout=self._timeout_seconds) as http:
            yield Connection(client=self, http=http, places=asyncio.Semaphore(self._concurrency))

    async def ask(self, http: httpx.AsyncClient, body: Mapping[str, Any]) -> Reply:
        """Send a request until there is a reply.

        Raises:
            ChatError: If there is none after all retries, or the server refuses the request.
        """
        retries = AsyncRetrying(
            stop=stop_after_attempt(self._max_retries + 1),
            wait=_wait_seconds,
            retry=retry_if_exception_type(_PassingError),
            reraise=True,
        )
        reply: Reply = await retries(self._ask_once, http, body)
        return reply

    async def _ask_once(self, http: httpx.AsyncClient, body: Mapping[str, Any]) -> Reply:
        async with self._turn():
            try:
                response = await http.post(self._url, json=body)
            except httpx.TransportError as error:
                text = str(error) or type(error).__name__
                raise _PassingError(f"{self._place()} does not answer: {text}") from error
        if response.is_success:
            return self._reply(response)
        text = f"{self._place()} answered {response.status_code}: {self._message(response)}"
        if response.status_code in _PASSING or response.status_code >= 500:
            raise _PassingError(text, _retry_after(response))
        raise ChatError(text)

    def _turn(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Wait for a turn within the rate; a limiter belongs to the event loop that it was first used in."""
        if self._requests_per_minute is None:
            return contextlib.nullcontext()
        loop = asyncio.get_running_loop()
        if self._limiter is None or self._limiter[0] is not loop:
            # Evenly spaced: a bucket for a whole minute would send them all at once in its first second.
            self._limiter = loop, AsyncLimiter(1, 60 / self._requests_per_minute)
        return self._limiter[1]

    def _reply(self, response: httpx.Response) -> Reply:
        try:
            content = response.json()
            usage = content.get("usage") or {}
            return Reply(
                text=_storable(content["choices"][0]["message"]["content"] or ""),
                num_input_tokens=int(usage.get("prompt_tokens") or 0),
                num_output_tokens=int(usage.get("completion_tokens") or 0),
            )
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise _PassingError(
                f"{self._place()} answered what is no reply: {self._without_key(response.text)}"
            ) from error

    def _message(self, response: httpx.Response) -> str:
        try:
            error = response.json()["error"]
            text = error["message"] if isinstance(error, dict) else error
        except (ValueError, TypeError, LookupError):
            text = response.text
        return self._without_key(str(text))

    def _without_key(self, text: str) -> str:
        """Shorten a text of the server, which may have repeated the key."""
        text = " ".join(text.split())
        return (text if self._api_key is None else text.replace(self._api_key, "***"))[:200]

    def _place(self) -> str:
        return shown_url(self._url)


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """Open connections to a server.

    Attributes:
        client: What asks.
        http: What sends.
        places: Taken while a request is under way.
    """

    client: ChatClient
    http: httpx.AsyncClient
    places: asyncio.Semaphore

    async def ask(self, body: Mapping[str, Any]) -> Reply:
        """Ask as `ChatClient.ask` does, when there is a place.

        Raises:
            ChatError: Likewise.
        """
        async with self.places:
            return await self.client.ask(self.http, body)


def shown_url(url: str) -> str:
    """Give a URL as it may be shown: without a user's name and password, and without what follows a question mark."""
    return str(httpx.URL(url).copy_with(userinfo=b"", query=None))


def _storable(text: str) -> str:
    """Replace halves of characters, which JSON can hold and files cannot."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _wait_seconds(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome is not None else None
    asked = error.seconds if isinstance(error, _PassingError) else None
    return min(max(_BACKOFF(state), asked or 0.0), _MAX_WAIT_SECONDS)


def _retry_after(response: httpx.Response) -> float | None:
    """Read how long a server asks to wait: seconds or a date (RFC 9110, section 10.2.3)."""
    text = response.headers.get("retry-after", "")
    with contextlib.suppress(ValueError):
        return float(text)
    with contextlib.suppress(ValueError, TypeError):
        date = email.utils.parsedate_to_datetime(text)
        return (date - datetime.now(UTC)).total_seconds()
    return None
