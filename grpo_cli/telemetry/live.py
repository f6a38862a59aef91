"""The view for a terminal: a progress bar, the present phase and the newest metrics stay below everything else."""

import time
from collections.abc import Mapping

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from grpo_cli.telemetry.plain import PlainView, highlights

PHASES = {
    "generate": "sampling completions",
    "score": "computing rewards",
    "forward_backward": "forward and backward",
    "optimizer": "optimizer step",
    "sync": "syncing weights",
    "evaluate": "evaluating",
    "checkpoint": "saving a checkpoint",
}
"""How a phase is called on the screen."""


class Speed:
    """How much the present phase has sampled. Counting is cheap; the text is made when the screen is drawn."""

    def __init__(self) -> None:
        self._tokens = 0
        self._began = self._last = time.monotonic()

    def add(self, tokens: int) -> None:
        """Take tokens that were sampled just now."""
        self._tokens += tokens
        self._last = time.monotonic()

    def text(self) -> str:
        """Write `N tokens, M tokens/s`, over the time up to the last token; nothing if there was none."""
        seconds = self._last - self._began
        rate = f", {self._tokens / seconds:,.0f} tokens/s" if seconds > 0 else ""
        return f"{self._tokens:,} tokens{rate}" if self._tokens else ""


class LiveView(PlainView):
    """A live view. It appears with the first phase; what is said meanwhile scrolls above it.

    Args:
        console: An interactive terminal.
        total_steps: Steps of the whole run.
    """

    def __init__(self, console: Console, total_steps: int) -> None:
        super().__init__(console, total_steps)
        self._metrics = Text()
        self._speed = Speed()
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.fields[phase]:<20}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("eta {task.fields[eta]}", markup=False),
            console=console,
        )
        self._task = self._progress.add_task("", total=total_steps, phase="", eta="-")
        self._live = Live(console=console, get_renderable=self._drawing)

    def resume_at(self, step: int) -> None:
        """Put the bar where the run is."""
        self._progress.update(self._task, completed=step)

    def phase(self, name: str) -> None:
        """Show what the run is doing now."""
        self._speed = Speed()
        self._live.start()
        self._progress.update(self._task, phase=PHASES.get(name, name))

    def progress(self, tokens: int) -> None:
        """Count tokens; the next drawing shows them."""
        self._speed.add(tokens)

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        """Move the bar and show the newest metrics."""
        if "step_time" in numbers:
            self._pace.add(numbers["step_time"])
        self._metrics = highlights(numbers)
        self._progress.update(self._task, completed=step, eta=self._pace.eta(step))

    def close(self) -> None:
        """Draw the last state and leave the terminal as it was."""
        self._live.stop()

    def _drawing(self) -> Group:
        speed = self._speed.text()
        return Group(self._progress, *([Text(speed)] if speed else []), self._metrics)
