"""What a person sees of a run: a live view on a terminal, one plain line per step elsewhere."""

import sys
from collections.abc import Mapping
from typing import Protocol, TextIO

from rich.console import Console, RenderableType

from grpo_cli.telemetry.live import LiveView
from grpo_cli.telemetry.plain import PlainView


class View(Protocol):
    """Shows a run. Texts are shown as they are: nothing in them is markup, and control characters become escapes."""

    def resume_at(self, step: int) -> None:
        """Begin after a step other than 0."""
        ...

    def phase(self, name: str) -> None:
        """Show what the run is doing now."""
        ...

    def progress(self, tokens: int) -> None:
        """Count tokens that the present phase has sampled since the last call."""
        ...

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        """Show a step that is done."""
        ...

    def evaluation(self, step: int, numbers: Mapping[str, float]) -> None:
        """Show an evaluation."""
        ...

    def show(self, renderable: RenderableType) -> None:
        """Show anything that rich can draw."""
        ...

    def say(self, line: str) -> None:
        """Show an information."""
        ...

    def warn(self, line: str) -> None:
        """Show a warning."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was; more can still be said."""
        ...


def open_console(file: TextIO | None = None, *, quiet: bool = False) -> Console:
    """Make the console of a command: colours where the terminal has them and `NO_COLOR` is not set; never an encoding error.

    Args:
        file: Where to; standard output if left out.
        quiet: Show nothing.
    """
    stream = sys.stdout if file is None else file
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
    return Console(file=file, markup=False, highlight=False, emoji=False, quiet=quiet)


def open_view(console: Console, total_steps: int) -> View:
    """Choose the view that a console can show: live on a terminal that can move its cursor, else plain."""
    can_move_cursor = console.is_interactive and console.file.isatty()
    return LiveView(console, total_steps) if can_move_cursor else PlainView(console, total_steps)
