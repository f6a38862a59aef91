"""Spreading requests over servers: each has as many as it can sample at once, and gets the next when it has answered one."""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tenacity import AsyncRetrying, retry_if_exception_type, retry_if_not_exception_type, stop_after_attempt, wait_fixed

from grpo_cli.rollout.vllm.client import ServerError, ServerTimeoutError
from grpo_cli.rollout.vllm.completion import SampledTokens
from grpo_cli.rollout.vllm.servers import Server, StaleServerError, leave_out, none_left, outcomes, together

_ATTEMPTS = 3
"""How often a server is asked for the completions of a prompt before it counts as failed."""
_PAUSE_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a server made of a request.

    Attributes:
        number: Of the request.
        sampled: Its `n` completions.
    """

    number: int
    sampled: list[SampledTokens]


class Spreading:
    """Has requests answered, by whichever server is free. For one call of `answer`.

    Args:
        servers: Those that serve are asked. One that fails is left out, and its requests go to the others.
        report: Told of each answer, and in a line of each server that is left out. A later answer of the same number replaces an
            earlier one. Called in the requests' thread.
    """

    def __init__(self, servers: Sequence[Server], report: Callable[[Answer | str], None]) -> None:
        self._servers = servers
        self._report = report
        self._answered_by: dict[int, Server] = {}
        self._stale: set[Server] = set()

    async def answer(self, bodies: Sequence[Mapping[str, Any]]) -> None:
        """Have all requests answered, from the weights that the servers were given.

        Args:
            bodies: Of `VllmClient.completions`, all with the same `n`. They are safe to repeat: their seed says what is sampled.

        Raises:
            ServerError: If no server is left.
            TrainingError: If a server refuses one, is too slow for `request_timeout`, or is used by another run.
        """
        waiting: Sequence[int] = range(len(bodies))
        while waiting:
            places = self._places(bodies[0]["n"])
            await together([self._answer(number, bodies[number], places) for number in waiting])
            waiting = await self._doubtful()

    async def _doubtful(self) -> list[int]:
        """Find what servers answered that have been restarted since they were given the weights: it may be from others.

        What a server answered that has ended since is as good as ever.
        """
        servers = list(dict.fromkeys(self._answered_by.values()))
        for server, failure in zip(servers, await outcomes(server.check() for server in servers), strict=True):
            if isinstance(failure, StaleServerError):
                self._failed(server, failure)
        return [number for number, server in self._answered_by.items() if server in self._stale]

    def _failed(self, server: Server, failure: ServerError) -> None:
        """Leave a server out, and forget what it answered if that is in doubt.

        Raises:
            ServerError: If no other is left.
        """
        if isinstance(failure, StaleServerError):
            self._stale.add(server)
        if server.serves():  # the first of its requests that fails
            self._report(leave_out(server, failure, self._servers))

    def _places(self, completions: int) -> asyncio.Queue[Server]:
        """Give each server a place for every request that it can work on, and one more, so that it never waits for us."""
        rooms = {
            server: 1 + math.ceil(server.serving.max_num_seqs / completions)
            for server in self._servers
            if server.serving is not None and server.serves()
        }
        if not rooms:
            raise none_left(self._servers)
        places: asyncio.Queue[Server] = asyncio.Queue()
        for taken in range(max(rooms.values())):
            for server, room in rooms.items():
                if taken < room:
                    places.put_nowait(server)
        return places

    async def _answer(self, number: int, body: Mapping[str, Any], places: asyncio.Queue[Server]) -> None:
        """Have one request answered. Places of servers that failed are taken and not given back."""
        while True:
            server = await places.get()
            if not server.serves():
                continue
            try:
                sampled = await self._ask(server, body)
            except ServerError as failure:
                self._failed(server, failure)
                continue
            if not server.serves():  # it failed meanwhile, perhaps because it lost its weights
                continue
            places.put_nowait(server)
            self._answered_by[number] = server
            self._report(Answer(number=number, sampled=sampled))
            return

    async def _ask(self, server: Server, body: Mapping[str, Any]) -> list[SampledTokens]:
        """Ask a server up to three times; from the second on, not without a look at whether it has the weights."""
        attempts = AsyncRetrying(
            stop=stop_after_attempt(_ATTEMPTS),
            wait=wait_fixed(_PAUSE_SECONDS),
            retry=retry_if_exception_type(ServerError)
            & retry_if_not_exception_type((ServerTimeoutError, StaleServerError)),
            reraise=True,
        )
        async for attempt in attempts:
            with attempt:
                if attempt.retry_state.attempt_number > 1:
                    await server.check()
                return await server.complete(body)
        raise AssertionError("the last attempt returns or raises")
