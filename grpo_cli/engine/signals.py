"""SIGTERM, Ctrl-C and a closed terminal: stop at once where nothing can be lost, and as soon as possible elsewhere."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self

from grpo_cli.errors import Interrupted

PASSED_ON_SECONDS = 5.0
"""Within which a launcher passes a signal on."""

GRACE_SECONDS = 2.0
"""For the main thread to see a second signal; one that waits in a library for another process does not."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Turns signals into `Interrupted`, at a moment when the state can be saved.

    Used as a context manager. Inside `interruptible()` the signal raises right away: sampling, scoring and gradients leave no
    trace outside of memory. Elsewhere (an optimizer step, a checkpoint being written) it waits for the next `interruptible()`.
    A second signal acts as if nobody was listening; it ends the process also where the main thread waits in a library, such as for
    another process that does not come, and sees no signals.

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
        self._seen = 0
        self._wakeups: int | None = None

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup does with SIGHUP
                self._previous[number] = signal.signal(number, self._receive)
        if self._previous:
            numbers, self._wakeups = os.pipe()
            os.set_blocking(self._wakeups, False)
            signal.set_wakeup_fd(self._wakeups, warn_on_full_buffer=False)
            threading.Thread(target=self._watch, args=(numbers,), name="signals", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned
        self._previous = {}
        if self._wakeups is not None:
            signal.set_wakeup_fd(-1)
            os.close(self._wakeups)  # the thread reads the end
            self._wakeups = None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._seen += 1
        if self.received is not None:
            self._receive_again(number)
            return
        self.received = number
        self._since = time.monotonic()
        if self._interruptible:
            raise Interrupted(number)

    def _receive_again(self, number: int) -> None:
        if self._counts(time.monotonic() - self._since):
            self._restore()
            signal.raise_signal(number)

    def _counts(self, seconds: float) -> bool:
        """Tell whether a signal that comes so long after the first is another one."""
        return not self._passed_on or seconds > PASSED_ON_SECONDS

    def _watch(self, wakeups: int) -> None:
        """Read which signals come, as they come, and end the process at a second one that the main thread does not see."""
        came, first = 0, 0.0
        with contextlib.closing(os.fdopen(wakeups, "rb", buffering=0)) as numbers:
            while number := numbers.read(1):
                if number[0] not in _SIGNALS:
                    continue
                came += 1
                if came == 1:
                    first = time.monotonic()
                elif self._counts(time.monotonic() - first):
                    time.sleep(GRACE_SECONDS)
                    if self._seen < came:
                        sys.stderr.write(f"stopped by a second {signal.Signals(number[0]).name} while waiting\n")
                        os._exit(128 + number[0])

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


def _forget_wakeups() -> None:
    """Keep the signals of a process that was forked from being taken for those of the one it was forked from."""
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_wakeups)
