"""One worker process: started, asked, watched, and ended with everything that it has started."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_cli.scoring.isolation.arguments import written
from grpo_cli.scoring.isolation.failures import LostCallError, TimedOutError, readable
from grpo_cli.scoring.isolation.messages import LENGTH, MOST_REPLY_BYTES, framed
from grpo_cli.scoring.isolation.process_tree import kill_tree, taken_by_tree

MOST_PROCESSES = 64 + 8 * (os.cpu_count() or 1)
"""That a call may have at one time: several for each processor; one that has more is taken for a fork bomb."""

START_SECONDS = 300.0
"""Importing and constructing on a busy machine takes a while; it is not the call's fault."""

_FIRST_LOOK_SECONDS, _MOST_SECONDS_BETWEEN_LOOKS = 0.05, 1.0
"""A quick call is not looked at; a look at every process of a machine takes some milliseconds."""

_LAST_WORDS = 2000
"""Bytes of its output that are kept."""

_SECONDS_FOR_LAST_WORDS = 1.0
_SECONDS_TO_CLEAR_UP = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerLimits:
    """What a call may take.

    Attributes:
        seconds: Wall time.
        memory_bytes: Resident memory of the process and all that it has started.
    """

    seconds: float
    memory_bytes: float


class Worker:
    """A process that answers one request at a time. It sees nothing of the terminal, and Ctrl-C there does not reach it.

    Made and asked in one event loop.

    Args:
        limits: What a call may take.
        environment: Of the process.
    """

    def __init__(self, limits: WorkerLimits, environment: dict[str, str]) -> None:
        self._limits = limits
        self._verdict: str | None = None
        """Why it was ended."""
        self._output = b""
        self._connection, theirs = socket.socketpair()
        self._printed, prints = socket.socketpair()
        self._connection.setblocking(False)
        self._printed.setblocking(False)
        with theirs, prints:
            self._process = subprocess.Popen(  # noqa: S603  our own interpreter and module
                [sys.executable, "-P", "-m", "grpo_cli.scoring.isolation", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=prints.fileno(),
                stderr=prints.fileno(),
                start_new_session=True,
                env=environment,
            )
        self._draining = asyncio.create_task(self._drain())
        self._last_look = time.monotonic()

    @property
    def lives(self) -> bool:
        """Whether the process can be asked."""
        return self._process.poll() is None

    async def load(self, **keywords: Any) -> dict[str, Any]:
        """Have it load its function; it may take longer than a call."""
        return await self._ask(written({"kind": "load", "keywords": keywords}), seconds=START_SECONDS)

    async def call(self, message: bytes) -> dict[str, Any]:
        """Have it call its function.

        Args:
            message: Of `call_message`.

        Raises:
            LostCallError: If there is no answer within its limits. The process is gone then.
        """
        return await self._ask(message, seconds=self._limits.seconds)

    async def end(self) -> None:
        """End the process and everything that it has started, and hear what it printed last."""
        # In a thread: what cannot be killed at once does not hold up the calls of other functions.
        await asyncio.to_thread(kill_tree, self._process)
        self._connection.close()
        # Something that got away may hold its output open.
        await asyncio.wait([self._draining], timeout=_SECONDS_FOR_LAST_WORDS)
        self._draining.cancel()
        self._printed.close()

    async def has_too_much(self) -> bool:
        """Tell whether the process keeps more memory after a call than it may. Not looked at more often than once a second."""
        if time.monotonic() - self._last_look < _MOST_SECONDS_BETWEEN_LOOKS:
            return False
        return await self._look() is not None

    async def _ask(self, message: bytes, *, seconds: float) -> dict[str, Any]:
        watching = asyncio.create_task(self._watch())
        try:
            async with asyncio.timeout(seconds):
                await asyncio.get_running_loop().sock_sendall(self._connection, framed(message))
                (length,) = LENGTH.unpack(await self._receive(LENGTH.size))
                if length > MOST_REPLY_BYTES:
                    self._verdict = f"answered with {length / 2**20:.0f} MiB"
                    raise EOFError
                answer: dict[str, Any] = json.loads(await self._receive(length))
        except TimeoutError:
            await self.end()
            raise TimedOutError(self._with_last_words(f"took longer than {seconds:g} s and was ended")) from None
        except (EOFError, OSError):
            if self._verdict is None:  # it has ended by itself, and what is above it clears up and then tells how
                with contextlib.suppress(subprocess.TimeoutExpired):
                    await asyncio.to_thread(self._process.wait, _SECONDS_TO_CLEAR_UP)
            await self.end()
            raise LostCallError(self._with_last_words(self._verdict or self._how_it_ended())) from None
        except BaseException:  # cancelled: nobody waits for the answer any more, and nobody may get it by mistake
            await self.end()
            raise
        finally:
            watching.cancel()
        return answer

    async def _receive(self, size: int) -> bytes:
        loop = asyncio.get_running_loop()
        received = bytearray()
        while len(received) < size:
            part = await loop.sock_recv(self._connection, min(size - len(received), 2**20))
            if not part:
                raise EOFError
            received += part
        return bytes(received)

    async def _watch(self) -> None:
        """End the process if it takes too much."""
        pause = _FIRST_LOOK_SECONDS
        while True:
            await asyncio.sleep(pause)
            pause = min(1.5 * pause, _MOST_SECONDS_BETWEEN_LOOKS)
            self._verdict = await self._look()
            if self._verdict is not None:
                await asyncio.to_thread(kill_tree, self._process)
                return

    async def _look(self) -> str | None:
        """Find out whether the process takes too much, and say what."""
        self._last_look = time.monotonic()
        taken, processes = await asyncio.to_thread(taken_by_tree, self._process.pid)
        if taken > self._limits.memory_bytes:
            return f"took more than its `memory_limit` of {self._limits.memory_bytes / 2**30:g} GiB and was ended"
        return f"had more than {MOST_PROCESSES} processes and was ended" if processes > MOST_PROCESSES else None

    async def _drain(self) -> None:
        """Read what the process prints, and forget all but the end of it."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while part := await loop.sock_recv(self._printed, 2**16):
                self._output = (self._output + part)[-_LAST_WORDS:]

    def _how_it_ended(self) -> str:
        code = self._process.poll()
        if code is None or code == -signal.SIGKILL:
            return "was killed"
        if code >= 0:
            return f"ended its process with exit code {code}"
        names = {each.value: each.name for each in signal.Signals}
        return f"ended its process by {names.get(-code, f'signal {-code}')}"

    def _with_last_words(self, text: str) -> str:
        lines = readable(self._output.decode(errors="replace"), keep="\n").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), None)
        return text if last is None else f"{text}; the last that it printed: {last[-200:]}"


def call_message(arguments: Mapping[str, Any], *, state: Any) -> bytes:
    """Write what a process is asked.

    Args:
        arguments: By name; `completions` is among them.
        state: What an object that has one is to begin with.

    Raises:
        TypeError: If an argument cannot be sent.
    """
    completions: Sequence[Any] = arguments["completions"]
    # It logs into a journal of its own.
    sent = {name: value for name, value in arguments.items() if name not in ("log_extra", "log_metric")}
    return written({"kind": "call", "keywords": {"arguments": sent, "count": len(completions), "state": state}})
