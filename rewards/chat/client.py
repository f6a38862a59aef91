"""Asks a chat server: at most so many requests at once and a minute, again after a fault that may pass."""

import asyncio
import contextlib
import email.utils
import re
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
_FOR_ALL = frozenset({401, 403, 404})
"""Codes that every other request would get, too: the key, the model or the place is wrong."""
_MAX_WAIT_SECONDS = 120.0
_BACKOFF = wait_random_exponential(multiplier=0.5, max=30)


class ChatError(RuntimeError):
    """A chat server did not give a reply."""


class RefusedError(ChatError):
    """It will never give one to this request, whatever becomes of others."""


class UnansweredError(ChatError):
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
        is_complete: False where it was cut off at the largest number of tokens.
    """

    text: str
    num_input_tokens: int
    num_output_tokens: int
    is_complete: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Turns:
    """What holds requests back; it belongs to the event loop that it was first used in.

    Attributes:
        loop: That one.
        places: Taken while a request is under way.
        limiter: Waited for before each; None without a limit.
    """

    loop: asyncio.AbstractEventLoop
    places: asyncio.Semaphore
    limiter: AsyncLimiter | None


class ChatClient:
    """Asks one server.

    Args:
        base_url: Up to and with `/v1`.
        api_key: Sent as bearer token, without white space around it; shown nowhere.
        concurrency: Requests at the same time, over all calls.
        requests_per_minute: Over all calls; None sets no limit.
        timeout_seconds: For one request, until its answer is complete.
        max_retries: After faults that may pass: no connection, no answer in time, an answer that is none, the codes 408, 409, 425, 429
            and from 500 on. The wait grows, and is what `Retry-After` says if that is longer.

    Raises:
        ValueError: If the URL or the key cannot be used.
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
        self._url = f"{_checked_url(base_url).rstrip('/')}/chat/completions"
        self._api_key = None if api_key is None else _checked_key(api_key)
        self._concurrency = concurrency
        self._requests_per_minute = requests_per_minute
        self._timeout_seconds = timeout_seconds
        self._max_retries = max_retries
        self._held: _Turns | None = None

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator["Connection"]:
        """Keep connections open for the block."""
        headers = {} if self._api_key is None else {"Authorization": f"Bearer {self._api_key}"}
        limits = httpx.Limits(max_connections=self._concurrency)
        async with httpx.AsyncClient(headers=headers, timeout=None, limits=limits) as http:  # noqa: S113  see `_ask_once`
            yield Connection(client=self, http=http)

    async def ask(self, http: httpx.AsyncClient, body: Mapping[str, Any]) -> Reply:
        """Send a request until there is a reply.

        Raises:
            UnansweredError: If there is none after all retries.
            RefusedError: If the server refuses this request.
            ChatError: If it refuses every request.
        """
        retries = AsyncRetrying(
            stop=stop_after_attempt(self._max_retries + 1),
            wait=_wait_seconds,
            retry=retry_if_exception_type(UnansweredError),
            reraise=True,
        )
        async with self._turns().places:
            reply: Reply = await retries(self._ask_once, http, body)
        return reply

    async def _ask_once(self, http: httpx.AsyncClient, body: Mapping[str, Any]) -> Reply:
        if (limiter := self._turns().limiter) is not None:
            await limiter.acquire()
        try:
            async with asyncio.timeout(
                self._timeout_seconds
            ):  # httpx would limit each read of an answer, not all of them
                response = await http.post(self._url, json=body)
        except TimeoutError:
            raise UnansweredError(f"{self._place()} does not answer: not within {self._timeout_seconds:g} s") from None
        except httpx.RequestError as error:
            text = self._without_key(str(error)) or type(error).__name__
            raise UnansweredError(f"{self._place()} does not answer: {text}") from None
        if response.is_success:
            return self._reply(response)
        text = f"{self._place()} answered {response.status_code}: {self._message(response)}"
        if response.status_code in _PASSING or response.status_code >= 500:
            raise UnansweredError(text, _retry_after(response))
        raise ChatError(text) if response.status_code in _FOR_ALL else RefusedError(text)

    def _turns(self) -> _Turns:
        loop = asyncio.get_running_loop()
        if self._held is None or self._held.loop is not loop:
            # Evenly spaced: a bucket for a whole minute would send them all at once in its first second.
            rate = self._requests_per_minute
            limiter = None if rate is None else AsyncLimiter(1, 60 / rate)
            self._held = _Turns(loop=loop, places=asyncio.Semaphore(self._concurrency), limiter=limiter)
        return self._held

    def _reply(self, response: httpx.Response) -> Reply:
        try:
            content = response.json()
            usage, choice = content.get("usage") or {}, content["choices"][0]
            return Reply(
                text=storable(choice["message"]["content"] or ""),
                num_input_tokens=int(usage.get("prompt_tokens") or 0),
                num_output_tokens=int(usage.get("completion_tokens") or 0),
                is_complete=choice.get("finish_reason") != "length",
            )
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise UnansweredError(
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
        """Shorten a text, which may repeat the key: as it is, or escaped as in JSON and in addresses."""
        text = " ".join(text.split())
        if self._api_key is not None:
            forms = (rf"(?:\\?{re.escape(each)}|\\u00{ord(each):02x}|%{ord(each):02x})" for each in self._api_key)
            text = re.sub("".join(forms), "***", text, flags=re.IGNORECASE)
        return text[:200]

    def _place(self) -> str:
        return shown_url(self._url)


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """Open connections to a server.

    Attributes:
        client: What asks.
        http: What sends.
    """

    client: ChatClient
    http: httpx.AsyncClient

    async def ask(self, body: Mapping[str, Any]) -> Reply:
        """Ask as `ChatClient.ask` does.

        Raises:
            ChatError: Likewise.
        """
        return await self.client.ask(self.http, body)


def shown_url(url: str) -> str:
    """Give a URL as it may be shown: without a user's name and password, and without what follows a question mark."""
    return str(httpx.URL(url).copy_with(userinfo=b"", query=None))


def _checked_url(url: str) -> str:
    """Refuse an address to which nothing can be sent.

    Raises:
        ValueError: If it is one.
    """
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ValueError(f"base_url is no address: {error}") from error
    if parsed.scheme not in {"http", "https"} or not parsed.host:
        raise ValueError(f"base_url is {shown_url(url)!r}; allowed is an address that begins with http:// or https://")
    return url


def _checked_key(key: str) -> str:
    """Take white space off a key.

    Raises:
        ValueError: If a header cannot hold the rest; the key is not in the text.
    """
    key = key.strip()
    if not key or not all("!" <= each <= "~" for each in key):
        raise ValueError("the API key is empty, or holds spaces, control characters or letters that are not ASCII")
    return key


def storable(text: str) -> str:
    """Replace halves of characters, which JSON can hold and files cannot."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _wait_seconds(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome is not None else None
    asked = error.seconds if isinstance(error, UnansweredError) else None
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
