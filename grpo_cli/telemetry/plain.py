"""The view for log files and pipes: one line per step."""

from collections import deque
from collections.abc import Callable, Mapping

from rich.console import Console, RenderableType
from rich.text import Text

from grpo_cli.telemetry.readable import duration, percent, short, visible

HIGHLIGHTS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("reward", "reward", short),
    ("reward_std", "std", short),
    ("loss", "loss", short),
    ("grad_norm", "grad_norm", short),
    ("entropy", "entropy", short),
    ("kl", "kl", short),
    ("completions/mean_length", "length", short),
    ("completions/clipped_ratio", "clipped", percent),
    ("learning_rate", "lr", short),
    ("tokens_per_second", "tokens/s", short),
    ("step_time", "time", duration),
)
"""The metrics that are shown at every step: name, label, how it is written."""


class Pace:
    """Predicts when a run ends from its last steps.

    Args:
        total_steps: Steps of the whole run.
    """

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._seconds: deque[float] = deque(maxlen=20)

    def add(self, seconds: float) -> None:
        """Take the time of a step."""
        self._seconds.append(seconds)

    def eta(self, step: int) -> str:
        """Write the time that is left after a step; a dash while that is unknown."""
        if not self._seconds:
            return "-"
        return duration((self._total_steps - step) * sum(self._seconds) / len(self._seconds))


class PlainView:
    """One line per step, for log files and pipes: no phases, no control codes.

    Args:
        console: Where to.
        total_steps: Steps of the whole run.
    """

    def __init__(self, console: Console, total_steps: int) -> None:
        self.console = console
        self._total_steps = total_steps
        self._pace = Pace(total_steps)

    def resume_at(self, step: int) -> None:
        """Nothing depends on it: each line tells its step."""

    def phase(self, name: str) -> None:
        """A log has no place for it."""

    def progress(self, tokens: int) -> None:
        """Nor for this."""

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write one line."""
        if "step_time" in numbers:
            self._pace.add(numbers["step_time"])
        width = len(str(self._total_steps))
        line = Text(f"step {step:>{width}}/{self._total_steps}  ").append(highlights(numbers))
        self.show(line.append(f"  eta {self._pace.eta(step)}"))

    def evaluation(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write one line."""
        self.show(evaluation_line(step, numbers))

    def show(self, renderable: RenderableType) -> None:
        """Write anything that rich can draw; lines are not wrapped."""
        self.console.print(
            renderable, soft_wrap=isinstance(renderable, Text), markup=False, highlight=False, emoji=False
        )

    def say(self, line: str) -> None:
        """Write a line."""
        self.show(plain_text(line))

    def warn(self, line: str) -> None:
        """Write a line that begins with `warning:`."""
        self.show(Text("warning: ", style="yellow").append(plain_text(line)))

    def close(self) -> None:
        """There is nothing to restore."""


def highlights(numbers: Mapping[str, float]) -> Text:
    """Write the metrics of a step that matter most on one line; those it does not have are left out."""
    line = Text()
    for name, label, write in HIGHLIGHTS:
        if name in numbers:
            line.append("  " if line else "").append(f"{label} ", style="dim").append(write(numbers[name]))
    return line


def evaluation_line(step: int, numbers: Mapping[str, float]) -> Text:
    """Write the metrics of an evaluation that matter most on one line."""
    bare = {name.removeprefix("eval/"): value for name, value in numbers.items()}
    rewards = [(whose, value) for name, value in bare.items() if (whose := _rewarded(name)) is not None]
    line = Text(f"evaluation at step {step}  ", style="bold").append(highlights(bare))
    if len(rewards) > 1:
        for name, value in rewards:
            line.append(f"  {visible(name)} ", style="dim").append(short(value))
    return line


def _rewarded(name: str) -> str | None:
    """Say whose reward a metric is: a reward function's, or that of all completions of a dataset with a name; None: neither."""
    match name.split("/"):
        case ["reward", function, "mean"]:
            return function
        case [dataset, "reward"]:
            return dataset
    return None


def plain_text(text: str) -> Text:
    """Make a text that shows as it is, line by line."""
    return Text("\n".join(visible(line) for line in text.split("\n")))
