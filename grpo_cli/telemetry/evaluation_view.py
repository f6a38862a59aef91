"""What a person sees while `grpo eval` is at work: a bar on a terminal, plain lines elsewhere."""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from grpo_cli.telemetry.live import Speed
from grpo_cli.telemetry.plain import plain_text
from grpo_cli.telemetry.readable import visible

SECONDS_BETWEEN_LINES = 10.0
"""Of a log: parts may be short."""


class EvaluationView:
    """Shows how far an evaluation has come.

    Args:
        console: Where to.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = console.is_interactive and console.file.isatty()
        self._bar: Progress | None = None
        self._dataset = ""
        self._done = self._total = 0
        self._speed = Speed()
        self._told_at = time.monotonic()

    def begin(self, dataset: str, *, total: int) -> None:
        """Begin with a dataset.

        Args:
            dataset: Its name.
            total: Its prompts.
        """
        self.close()
        self._dataset, self._done, self._total, self._speed = dataset, 0, total, Speed()
        self._told_at = time.monotonic()
        if not self._live:
            return
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[speed]}", markup=False),
            console=self._console,
            transient=True,
        )
        self._bar.add_task(visible(dataset), total=total, speed="")
        self._bar.start()

    def progress(self, tokens: int) -> None:
        """Count tokens that were sampled since the last call."""
        self._speed.add(tokens)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], speed=self._speed.text())

    def sampled(self, prompts: int) -> None:
        """Count prompts whose completions are kept."""
        self._done += prompts
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done)
        elif self._done == self._total or time.monotonic() - self._told_at > SECONDS_BETWEEN_LINES:
            self._told_at = time.monotonic()
            speed = self._speed.text()
            self.say(f"{self._dataset}: {self._done:,} of {self._total:,} prompts{f', {speed}' if speed else ''}")

    def say(self, line: str) -> None:
        """Show an information."""
        self._console.print(plain_text(line), soft_wrap=True, markup=False, highlight=False, emoji=False)

    def warn(self, line: str) -> None:
        """Show a warning."""
        text = Text("warning: ", style="yellow").append(plain_text(line))
        self._console.print(text, soft_wrap=True, markup=False, highlight=False, emoji=False)

    def close(self) -> None:
        """Leave the terminal as it was; more can still be said."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
