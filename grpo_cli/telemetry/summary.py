"""The last words of a run: what improved, and where everything is."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_cli.telemetry.readable import duration, short

WINDOW = 5
"""Steps at either end of a run that are compared; fewer if the run has less than twice as many."""

CERTAIN = 3.0
"""Standard errors by which two means must differ to be called different."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """How a run ended.

    Attributes:
        steps_done: Optimizer steps done, those before a resume included.
        total_steps: Optimizer steps of the whole run.
        seconds: Wall time of this process.
        final_model: The folder of the final model; None if the run is not complete.
        best_checkpoint: The folder of the best checkpoint by the evaluation metric, if there is one.
        resume_command: What continues the run.
    """

    steps_done: int
    total_steps: int
    seconds: float
    final_model: Path | None = None
    best_checkpoint: Path | None = None
    resume_command: str = "the same command and --resume"


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowMean:
    """Mean of a metric over some steps.

    Attributes:
        first, last: The steps at the ends.
        mean: Mean of the steps' values.
        error: Standard error of that mean, from the spread between the steps.
    """

    first: int
    last: int
    mean: float
    error: float


def summary_lines(summary: RunSummary, records: Sequence[Mapping[str, Any]], places: Mapping[str, Path]) -> list[str]:
    """Write the last lines of a run.

    Args:
        summary: How it ended.
        records: The objects of metrics.jsonl.
        places: What else there is to find, and where.
    """
    took, steps = duration(summary.seconds), f"{summary.steps_done} of {summary.total_steps}"
    if summary.final_model is not None:
        lines = [f"finished {steps} steps in {took}"]
    else:
        lines = [f"stopped at step {steps} after {took}; resume with {summary.resume_command}"]
    lines.append(sentence(series(records, "reward")))
    evaluations = series(records, "eval/reward")
    if len(evaluations) > 1:
        (first, before), (last, after) = evaluations[0], evaluations[-1]
        lines.append(f"eval/reward went from {short(before)} (step {first}) to {short(after)} (step {last})")
    found = {"model": summary.final_model, "best checkpoint": summary.best_checkpoint, **places}
    present = {label: path for label, path in found.items() if path is not None}
    width = max((len(label) for label in present), default=0)
    return lines + [f"  {label:<{width}}  {path}" for label, path in present.items()]


def series(records: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    """Pick the steps that have a metric, and its values; null is no value."""
    return [(record["step"], record[name]) for record in records if record.get(name) is not None]


def sentence(rewards: Sequence[tuple[int, float]]) -> str:
    """Say how the reward of the last steps compares with that of the first, and whether the difference is more than noise."""
    if len(rewards) < 2:
        return "no reward was recorded" if not rewards else f"reward was {short(rewards[0][1])} at step {rewards[0][0]}"
    count = min(WINDOW, len(rewards) // 2)
    before, after = window_mean(rewards[:count]), window_mean(rewards[-count:])
    if count == 1:
        return (
            f"reward was {short(before.mean)} at step {before.first} and {short(after.mean)} at step {after.last}: "
            "too few steps to tell a trend"
        )
    decimals = _decimals(before, after)
    ends = f"{_written(before, decimals)} to {_written(after, decimals)}"
    difference, error = after.mean - before.mean, math.hypot(before.error, after.error)
    if difference == 0 or abs(difference) <= CERTAIN * error:
        return f"reward did not change by more than noise: from {ends}"
    return f"reward {'rose' if difference > 0 else 'fell'} from {ends}"


def window_mean(values: Sequence[tuple[int, float]]) -> WindowMean:
    """Average a metric over steps; the standard error is s / sqrt(n) with the sample deviation s, NaN for one step."""
    numbers = [value for _, value in values]
    count = len(numbers)
    mean = math.fsum(numbers) / count
    variance = math.fsum((value - mean) ** 2 for value in numbers) / (count - 1) if count > 1 else math.nan
    return WindowMean(first=values[0][0], last=values[-1][0], mean=mean, error=math.sqrt(variance / count))


def _written(window: WindowMean, decimals: int) -> str:
    return f"{window.mean:.{decimals}f} ± {window.error:.{decimals}f} (steps {window.first}-{window.last})"


def _decimals(before: WindowMean, after: WindowMean) -> int:
    """Write as many decimals as show two digits of the larger error, but no fewer than two."""
    error = max(before.error, after.error)
    return 2 if error == 0 else min(8, max(2, 1 - math.floor(math.log10(error))))
