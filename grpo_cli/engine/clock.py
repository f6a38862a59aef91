"""Wall time by phase."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Clock:
    """Adds up the seconds of a step's phases.

    Args:
        announce: Called with a phase's name when it begins.
    """

    def __init__(self, announce: Callable[[str], None]) -> None:
        self._announce = announce
        self._began = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase; the same name again adds to it."""
        self._announce(name)
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began

    def seconds(self) -> dict[str, float]:
        """Give the seconds by phase so far, and under `step` the whole."""
        return {**self._seconds, "step": time.perf_counter() - self._began}
