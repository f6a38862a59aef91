"""SIGTERM, Ctrl-C and a closed terminal: stop at once where nothing can be lost, and as soon as possible elsewhere."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self

from grpo_cli.errors import Interrupted

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Turns signals into `Interrupted`, at a moment when the state can be saved.

    Used as a context manager. Inside `interruptible()` the signal raises right away: sampling, scoring and gradients leave no
    trace outside of memory. Elsewhere (an optimizer step, a checkpoint being written) it waits for the next `interruptible()`.
    A second signal acts as if nobody was listening.
    """

    def __init__(self) -> None:
        self.received: int | None = None
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
        self.received = number
        self._restore()
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
