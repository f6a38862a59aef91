"""Everything that a run tells goes through here: to files first, then to the console, then to trackers."""

import math
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_cli.metrics import results
from grpo_cli.recipe.schema import LoggingSection
from grpo_cli.telemetry.completions import CompletionFiles
from grpo_cli.telemetry.console import View
from grpo_cli.telemetry.files import JsonLines
from grpo_cli.telemetry.names import EVALUATION_PREFIX, in_table_order
from grpo_cli.telemetry.records import Evaluation, Rollouts
from grpo_cli.telemetry.repeats import RepeatedWarnings
from grpo_cli.telemetry.samples import pick_samples, samples_table
from grpo_cli.telemetry.summary import RunSummary, summary_lines
from grpo_cli.telemetry.trackers import TrackedRun, Trackers, require_trackers
from grpo_cli.types import StepReport

__all__ = ["Evaluation", "Recorder", "Rollouts", "RunSummary"]


class Recorder:
    """Takes reports and passes them on. The files are the truth: console and trackers may fail, files may not.

    Args:
        output_dir: The run directory.
        settings: The recipe's `logging` section.
        view: The console's view.
        reward_names: One name per reward function [F].
        run_name: The run's name, for trackers.
        recipe: The resolved recipe, for trackers.

    Raises:
        RecipeError: If a tracker's package is not installed.
    """

    def __init__(
        self,
        *,
        output_dir: Path,
        settings: LoggingSection,
        view: View,
        reward_names: Sequence[str],
        run_name: str,
        recipe: Mapping[str, Any],
    ) -> None:
        require_trackers(settings.report_to)
        self._output_dir = output_dir
        self._settings = settings
        self._view = view
        self._reward_names = tuple(reward_names)
        self._run_name = run_name
        self._recipe = recipe
        self._run_id = uuid.uuid4().hex[:8]
        self._new_run = False
        self._resumed_at: int | None = None
        self._sampled_at = 0
        self._metrics = JsonLines(output_dir / "metrics.jsonl")
        self._completions = CompletionFiles(output_dir, reward_names)
        self._warnings = RepeatedWarnings()
        self._trackers: Trackers | None = None

    def resume_at(self, step: int, *, evaluated: bool = True) -> None:
        """Forget what was recorded after a step, since it will be done again.

        Args:
            step: Optimizer steps done.
            evaluated: Whether the evaluation of that step, if there is one, is done too; if not, its record goes.

        Raises:
            TrainingError: If a file cannot be rewritten or removed.
        """
        self._metrics.keep(lambda record: _belongs(record, step, evaluated=evaluated))
        self._completions.drop_after(step, step if evaluated else step - 1)
        self._resumed_at = self._sampled_at = step
        self._view.resume_at(step)

    def phase(self, name: str) -> None:
        """Show what the run is doing now."""
        self._open_trackers()
        self._view.phase(name)

    def progress(self, tokens: int) -> None:
        """Show how fast a phase samples.

        Args:
            tokens: Tokens sampled since the last call; it may be called at every decoding step.
        """
        self._view.progress(tokens)

    def record_step(self, report: StepReport, rollouts: Rollouts | None = None) -> None:
        """Record an optimizer step, and what it generated if it did.

        Raises:
            TrainingError: If a file cannot be written.
        """
        numbers = step_numbers(report)
        self._metrics.append(_record(report.step, numbers))
        if rollouts is not None and self._settings.log_completions:
            self._completions.write_training(report.step, rollouts)
        self._view.step(report.step, numbers)
        if rollouts is not None and rollouts.scored:
            self._show_samples(report.step, rollouts)
        self._open_trackers().log(report.step, numbers)

    def record_evaluation(self, evaluation: Evaluation) -> None:
        """Record an evaluation, as an object of its own in metrics.jsonl.

        Raises:
            TrainingError: If a file cannot be written.
        """
        numbers = {name: evaluation.metrics[name] for name in in_table_order(evaluation.metrics)}
        self._metrics.append(_record(evaluation.step, numbers))
        if self._settings.log_completions:
            self._completions.write_evaluation(evaluation)
        self._view.evaluation(evaluation.step, numbers)
        self._open_trackers().log(evaluation.step, numbers)

    def say(self, line: str) -> None:
        """Show an information."""
        self._view.say(line)

    def warn(self, key: str, message: str) -> None:
        """Show a warning, unless its like was shown before: then it is counted, and shown at 10, 100, ... and at the end.

        Args:
            key: What makes two warnings the same.
            message: One line: what happened, what to do.
        """
        due = self._warnings.add(key, message)
        if due is not None:
            self._view.warn(due)

    def state_dict(self) -> dict[str, Any]:
        """Give the state for a checkpoint, as JSON."""
        return {"run_id": self._run_id, "warnings": self._warnings.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], *, new_run: bool = False) -> None:
        """Restore the state.

        Args:
            state: What `state_dict` gave.
            new_run: Whether this run only starts from another one's checkpoint. To trackers it is a run of its own then, so
                that nothing is added to the other.
        """
        self._new_run = new_run
        if not new_run:
            self._run_id = state["run_id"]
        self._warnings.load_state_dict(state["warnings"])

    def finish(self, summary: RunSummary) -> None:
        """Say how a run ended, complete or not, and close everything."""
        self.close()
        places = {
            "metrics": self._metrics.path,
            "completions": self._completions.train_folder,
            "eval completions": self._completions.eval_folder,
        }
        present = {label: path for label, path in places.items() if path.exists()}
        for line in summary_lines(summary, self._metrics.records(), present):
            self._view.say(line)

    def close(self) -> None:
        """Show what was held back, and close files, view and trackers. It can be called again."""
        if self._trackers is not None:
            self._trackers.close()
            self._trackers = None
        self._view.close()
        for message in self._warnings.outstanding():
            self._view.warn(message)
        self._metrics.close()

    def _show_samples(self, step: int, rollouts: Rollouts) -> None:
        """Show samples when a multiple of `print_completions_steps` was reached or passed since the last time."""
        every = self._settings.print_completions_steps
        if not every or step // every == self._sampled_at // every:
            return
        self._sampled_at = step
        samples = pick_samples(rollouts, self._settings.num_completions_to_print)
        self._view.show(samples_table(samples, self._reward_names, step=step))

    def _open_trackers(self) -> Trackers:
        """Start the trackers, once it is known where the run begins."""
        if self._trackers is None:
            run = TrackedRun(
                output_dir=self._output_dir,
                project=self._settings.project or "grpo",
                name=self._run_name,
                id=self._run_id,
                recipe=self._recipe,
                resumed_at=None if self._new_run else self._resumed_at,
            )
            self._trackers = Trackers(self._settings.report_to, run, warn=self.warn)
        return self._trackers


def is_recorded(settings: LoggingSection, steps_per_window: int, step: int) -> bool:
    """Tell whether the completions of a generation are written or may be shown.

    Args:
        settings: What is.
        steps_per_window: Optimizer steps that train on a generation.
        step: Optimizer steps done before it.
    """
    every = settings.print_completions_steps
    shown = every > 0 and (step + 1) // every != max(step + 1 - steps_per_window, 0) // every
    return settings.log_completions or shown


def step_numbers(report: StepReport) -> dict[str, float]:
    """Turn a report into numbers in the table's order, with `time/{phase}`, `step_time` and `tokens_per_second`."""
    numbers = results(report.metrics)
    numbers |= {f"time/{phase}": seconds for phase, seconds in report.seconds.items() if phase != "step"}
    if "step" in report.seconds:
        numbers["step_time"] = report.seconds["step"]
        if "tokens/useful" in numbers and report.seconds["step"] > 0:
            numbers["tokens_per_second"] = numbers["tokens/useful"] / report.seconds["step"]
    return {name: numbers[name] for name in in_table_order(numbers)}


def _record(step: int, numbers: Mapping[str, float]) -> dict[str, float | None]:
    """Make an object for metrics.jsonl; JSON has no NaN and no infinity, so they become null."""
    return {"step": step, **{name: value if math.isfinite(value) else None for name, value in numbers.items()}}


def _belongs(record: Mapping[str, Any], step: int, *, evaluated: bool) -> bool:
    """Tell whether a record is part of a run that has done `step` steps."""
    at: float = record.get("step", math.inf)
    is_evaluation = any(name.startswith(EVALUATION_PREFIX) for name in record)
    return at < step or (at == step and (evaluated or not is_evaluation))
