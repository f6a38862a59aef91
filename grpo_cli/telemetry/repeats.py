"""Warnings that repeat: the first is shown, the rest are counted."""

from collections.abc import Mapping
from typing import Any


class RepeatedWarnings:
    """Decides which of many equal warnings a person should see.

    A warning is shown the first time that this process gives it, and then each time that its count reaches a power of ten. The
    counts go through checkpoints.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._messages: dict[str, str] = {}
        self._shown: dict[str, int] = {}

    def add(self, key: str, message: str) -> str | None:
        """Count a warning; give the text to show, or None."""
        count = self._counts[key] = self._counts.get(key, 0) + 1
        self._messages[key] = message
        if key in self._shown and not _is_power_of_ten(count):
            return None
        self._shown[key] = count
        return message if count == 1 else _counted(message, count)

    def outstanding(self) -> list[str]:
        """Give the texts of warnings that were given more often than was shown, and take them as shown."""
        due = [key for key, shown in self._shown.items() if self._counts[key] > shown]
        self._shown.update({key: self._counts[key] for key in due})
        return [_counted(self._messages[key], self._counts[key]) for key in due]

    def state_dict(self) -> dict[str, Any]:
        """Give the counts for a checkpoint."""
        return dict(self._counts)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts."""
        self._counts = {key: int(count) for key, count in state.items()}


def _counted(message: str, count: int) -> str:
    return f"{message} ({count} times)"


def _is_power_of_ten(count: int) -> bool:
    return str(count).strip("0") == "1"
