"""When and how often a reward function is called."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiolimiter import AsyncLimiter


@dataclass(frozen=True, kw_only=True, slots=True)
class CallLimits:
    """How calls of one reward function are made.

    Attributes:
        per_prompt: One call for each prompt, instead of one for all of a step.
        concurrency: Most calls at the same time, of functions that are waited for.
        calls_per_minute: Most calls that begin in any minute, spread evenly; None: no limit.
        timeout: Seconds after which a coroutine is cancelled; None: never.
        retries: Times that a call is made again before it has failed.
    """

    per_prompt: bool = False
    concurrency: int = 1
    calls_per_minute: float | None = None
    timeout: float | None = None
    retries: int = 0


class Throttle:
    """Lets calls begin as limits allow.

    Args:
        limits: Of the reward.
    """

    def __init__(self, limits: CallLimits) -> None:
        self._limits = limits
        self._loop: asyncio.AbstractEventLoop | None = None
        self._free = asyncio.Semaphore(limits.concurrency)
        self._rate: AsyncLimiter | None = None

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[None]:
        """Wait for a turn; what is inside is the call."""
        self._be_in(asyncio.get_running_loop())
        async with self._free:
            if self._rate is not None:
                await self._rate.acquire()
            yield

    def _be_in(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin anew in another loop: the former one was closed."""
        if loop is self._loop:
            return
        self._loop = loop
        self._free = asyncio.Semaphore(self._limits.concurrency)
        rate = self._limits.calls_per_minute
        self._rate = None if rate is None else AsyncLimiter(1, 60 / rate)
