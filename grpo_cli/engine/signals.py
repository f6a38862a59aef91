"""SIGTERM, Ctrl-C and a closed terminal: stop at once where nothing can be lost, and as soon as possible elsewhere."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self

from grpo_cli.engine.signal_watch import Repeats, SignalWatch
from grpo_cli.errors import Interrupted

PASSED_ON_SECONDS = 5.0
"""Within which a launcher passes a signal on."""

REPEATED_SECONDS = 1.0
"""Within which a signal that comes again is the same one: `timeout` sends it to its child, and to all beside it."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Turns signals into `Interrupted`, at a moment when the state can be saved.

    Used as a context manager. Inside `interruptible()` the signal raises right away: sampling, scoring and gradients leave no
    trace outside of memory. Elsewhere (an optimizer step, a checkpoint being written) it waits for the next `interruptible()`.
    A second signal acts as if nobody was listening; it ends the process also where the main thread waits in a library, see `SignalWatch`.

    Args:
        passed_on: Whether a launcher passes signals on that a terminal or a scheduler sends to all processes as well: then a second
            one counts only if it comes `PASSED_ON_SECONDS` later, and not `REPEATED_SECONDS`.
    """

    def __init__(self, *, passed_on: bool = False) -> None:
        self.received: int | None = None
        self._apart = PASSED_ON_SECONDS if passed_on else REPEATED_SECONDS
        self._repeats = Repeats(apart=self._apart)
        self._interruptible = False
        self._previous: dict[int, object] = {}
        self._watch: SignalWatch | None = None

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup does with SIGHUP
                self._previous[number] = signal.signal(number, self._receive)
        self._watch = SignalWatch(self._previous, apart=self._apart)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned
        self._previous = {}
        if self._watch is not None:
            self._watch.stop()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._watch is not None:
            self._watch.see()
        if self._repeats.is_another(time.monotonic()):
            self._restore()
            signal.raise_signal(number)
        elif self.received is None:
            self.received = number
            if self._interruptible:
                raise Interrupted(number)

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
