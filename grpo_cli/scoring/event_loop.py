"""An event loop in a thread of its own, for async reward functions."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any


class EventLoop:
    """Runs coroutines from any thread, even one that has a running loop itself. The thread starts with the first coroutine.

    It is one loop for the whole run, so that a reward function can keep its connections open between steps.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._running: set[asyncio.Task[Any]] = set()
        """Of the coroutines that were submitted; only the loop's thread touches it."""

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Start a coroutine."""
        if self._loop is None:
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=loop.run_forever, name="async-rewards", daemon=True)
            thread.start()
            self._loop, self._thread = loop, thread  # only now: a signal may come at any line
        return asyncio.run_coroutine_threadsafe(self._registered(coroutine), self._loop)

    def cancel(self) -> None:
        """Cancel all submitted coroutines that still run, also one whose future nobody got hold of because a signal came first."""
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._cancel_submitted(), self._loop)

    def close(self) -> None:
        """Cancel what still runs and end the thread."""
        if self._loop is None or self._thread is None:
            return
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = self._thread = None

    async def _registered(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            return await coroutine
        finally:
            self._running.discard(task)

    async def _cancel_submitted(self) -> None:
        for task in self._running:
            task.cancel()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
