"""SIGTERM, Ctrl-C and a closed terminal: stop at once where nothing can be lost, and as soon as possible elsewhere."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self

from grpo_cli.errors import Interrupted

PASSED_ON_SECONDS = 5.0
"""Within which a launcher passes a signal on."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Turns signals into `Interrupted`, at a moment when the state can be saved.

    Used as a context manager. Inside `interruptible()` the signal raises right away: sampling, scoring and gradients leave no
    trace outside of memory. Elsewhere (an optimizer step, a checkpoint being written) it waits for the next `interruptible()`.
    A second signal acts as if nobody was listening.

    Args:
        passed_on: Whether a launcher passes signals on that a terminal or a scheduler sends to all processes as well: then a second
            one counts only if it comes later than that.
    """

    def __init__(self, *, passed_on: bool = False) -> None:
        self.received: int | None = None
        self._passed_on = passed_on
        self._since = 0.0
        self._interruptible = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup does with SIGHUP
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned
        self._previous = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.received is not None:
            self._receive_again(number)
            return
        self.received = number
        self._since = time.monotonic()
        if not self._passed_on:
            self._restore()
        if self._interruptible:
            raise Interrupted(number)

    def _receive_again(self, number: int) -> None:
        if time.monotonic() - self._since > PASSED_ON_SECONDS:
            self._restore()
            os.kill(os.getpid(), number)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Run code that may be cut off anywhere.

        Raises:
            Interrupted: If a signal has come, also when the code swallowed the exception or wrapped it in one of its own.
        """
        self.raise_if_received()
        self._interruptible = True
        try:
            yield
        except (Interrupted, KeyboardInterrupt):  # the signal itself, or a second one
            raise
        except BaseException:
            self.raise_if_received()
            raise
        finally:
            self._interruptible = False
        self.raise_if_received()

    def raise_if_received(self) -> None:
        """Raise `Interrupted` if a signal has come."""
        if self.received is not None:
            raise Interrupted(self.received)
