"""A second signal to a process whose main thread waits in a library, such as for another process, and runs no Python any more."""

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Collection

GRACE_SECONDS = 2.0
"""For the main thread to see a second signal."""

LOOK_SECONDS = 0.1
"""Between looks for a second one."""


class Repeats:
    """Tells signals that ask again from those that are the first one once more.

    Args:
        apart: Seconds after the first that one comes to be another.
    """

    def __init__(self, *, apart: float) -> None:
        self._apart = apart
        self._first: float | None = None
        self._parent = os.getppid()

    def is_another(self, at: float) -> bool:
        """Take note of a signal that came at a time of the monotonic clock; the first is none."""
        before, self._parent = self._parent, os.getppid()
        if self._first is None:
            self._first = at
            return False
        # With another parent the kernel tells of a launcher that died: nobody has asked again.
        return self._parent == before and at - self._first > self._apart


class SignalWatch:
    """A thread that ends the process at a second signal that the main thread does not see.

    Python writes a byte to a pipe as soon as a signal comes; its handlers wait for the main thread.

    Args:
        numbers: Of the signals that count.
        apart: See `Repeats`.
    """

    def __init__(self, numbers: Collection[int], *, apart: float) -> None:
        self._numbers = frozenset(numbers)
        self._repeats = Repeats(apart=apart)
        self._seen_at = 0.0
        reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._stopped = False
        self._previous = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reading,), name="signals", daemon=True).start()

    def see(self) -> None:
        """Tell, from a handler, that the main thread has seen what came so far."""
        self._seen_at = time.monotonic()

    def stop(self) -> None:
        """Watch no more."""
        if not self._stopped:
            self._stopped = True
            signal.set_wakeup_fd(self._previous)
            os.close(self._writing)  # the thread reads the end

    def _watch(self, reading: int) -> None:
        """Wait for the first signal, and then look often: this thread may have to wait for its turn, and must know when a signal came."""
        heard = False
        with contextlib.closing(os.fdopen(reading, "rb", buffering=0)) as pipe:
            while True:
                since = time.monotonic()  # nothing is there that has not been read
                if heard and not select.select([reading], [], [], LOOK_SECONDS)[0]:
                    continue
                came = pipe.read(64)
                if not came:
                    return
                numbers = self._numbers.intersection(came)
                if not numbers:
                    continue
                at = since if heard else time.monotonic()
                heard = True
                if self._repeats.is_another(at):
                    time.sleep(GRACE_SECONDS)
                    if not self._stopped and self._seen_at < at:
                        _end(min(numbers))


def _end(number: int) -> None:
    """End the process at once, and say so if that is possible without waiting."""
    with contextlib.suppress(OSError, ValueError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, f"stopped by a second {signal.Signals(number).name} while waiting\n".encode())
    os._exit(128 + number)


def _forget() -> None:
    """Keep the signals of a process that was forked from being taken for those of the one it was forked from."""
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget)
