"""The recorder of a process that is not the one to tell."""

from grpo_cli.telemetry.recorder import Recorder
from grpo_cli.telemetry.records import Evaluation, Rollouts
from grpo_cli.telemetry.summary import RunSummary
from grpo_cli.types import StepReport


class SilentRecorder(Recorder):
    """Writes no file and starts no tracker; its view is of a console that shows nothing."""

    def resume_at(self, step: int, *, evaluated: bool = True) -> None:
        """Leave the files to the process that writes them."""

    def phase(self, name: str) -> None:
        """Show nothing."""

    def record_step(self, report: StepReport, rollouts: Rollouts | None = None) -> None:
        """Record nothing."""

    def record_evaluation(self, evaluation: Evaluation) -> None:
        """Record nothing."""

    def finish(self, summary: RunSummary) -> None:
        """Only close."""
        del summary
        self.close()
