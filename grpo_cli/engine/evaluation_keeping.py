"""Completions of an evaluation, kept while others are still being sampled."""

import time

from grpo_cli.engine.evaluation_store import EvaluationStore
from grpo_cli.telemetry.evaluation_view import EvaluationView
from grpo_cli.types import Group, PromptId

SECONDS_BETWEEN_PARTS = 10.0
COMPLETIONS_OF_A_PART = 512
"""What is complete is kept after this time, or as soon as it is so many: a killed evaluation loses that, and what is being sampled."""


class Keeping:
    """Keeps groups as they are complete, several together.

    Args:
        store: Where.
        view: Told of them.
    """

    def __init__(self, store: EvaluationStore, view: EvaluationView) -> None:
        self._store = store
        self._view = view
        self._waiting: dict[PromptId, Group] = {}
        self._kept: set[PromptId] = set()
        self._last = time.monotonic()

    def add(self, group: Group) -> None:
        """Take a group; one that an engine has sampled again is the same."""
        if group.prompt.uid in self._kept:
            return
        if not self._waiting and not self._kept:
            self._last = time.monotonic()  # an engine takes its time to start
        self._waiting[group.prompt.uid] = group
        waiting = len(self._waiting) * len(group.completions)
        if waiting >= COMPLETIONS_OF_A_PART or time.monotonic() - self._last > SECONDS_BETWEEN_PARTS:
            self.close()

    def close(self) -> None:
        """Keep what waits for it."""
        self._last = time.monotonic()
        waiting, self._waiting = self._waiting, {}
        if waiting:
            self._store.keep(list(waiting.values()))
            self._kept |= waiting.keys()
            self._view.sampled(len(waiting))
