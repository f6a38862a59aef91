"""The errors a user may meet, and what each one means for the exit code.

    GrpoError                   a person can act on the message; no traceback unless --debug
    ├── RecipeError             the recipe is wrong; all its problems at once            exit 2
    ├── ModelError              the model or tokenizer cannot be loaded or used          exit 2
    ├── DataError               the dataset cannot be read or does not fit               exit 2
    ├── RewardError             a reward function broke its contract                     exit 3
    ├── TrainingError           the run cannot go on (nothing but its last step is lost) exit 4
    │   ├── DiskError           a file of a run or an evaluation cannot be read or written exit 4
    │   └── LostProcessError    one of several processes has ended                       exit 1
    └── CheckpointError         a checkpoint cannot be written or read                   exit 5
    Interrupted                 SIGINT, SIGTERM or SIGHUP; the state is saved            exit 130 / 143 / 129

`grpo plan` ends with 6 where its answer is that a run does not fit; that is no error.

`Interrupted` is no `Exception`, as KeyboardInterrupt is none: a library or a reward function that survives every error of its own
must not survive a request to stop. Everything else that is raised is a mistake of ours and shows its traceback.
"""

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

DOES_NOT_FIT = 6
"""Exit code of `grpo plan` where a run does not fit."""


class GrpoError(Exception):
    """A failure with a message for a person.

    Args:
        message: One line: where, what was found, what is allowed.
        hint: The likely fix, if there is one.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  hint: {self.hint}"

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.args, self.__dict__))


def _rebuild(cls: type[GrpoError], args: tuple[object, ...], state: dict[str, object]) -> GrpoError:
    """Undo `GrpoError.__reduce__` (keyword-only arguments are not in `args`)."""
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


def causes(error: BaseException) -> Iterator[BaseException]:
    """Give an error and what led to it, one after another: systems' own words lie several exceptions deep."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One thing that is wrong with a recipe.

    Attributes:
        where: `file:line`, or `command line`.
        key: Dotted recipe key, such as `grpo.epsilon`.
        message: What was found and what is allowed.
        hint: The likely fix, such as "did you mean `num_generations`?".
    """

    where: str
    key: str
    message: str
    hint: str | None = None

    def __str__(self) -> str:
        line = f"{self.where}: {self.key}: {self.message}" if self.key else f"{self.where}: {self.message}"
        return line if self.hint is None else f"{line} ({self.hint})"


class RecipeError(GrpoError):
    """The recipe has problems; they are reported all at once, one a line."""

    exit_code = 2

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems


class ModelError(GrpoError):
    """The model or its tokenizer cannot be loaded or does not fit the recipe."""

    exit_code = 2


class DataError(GrpoError):
    """The dataset cannot be read or does not fit the recipe."""

    exit_code = 2


class RewardError(GrpoError):
    """A reward function raised, or returned what its contract does not allow."""

    exit_code = 3


class TrainingError(GrpoError):
    """The run cannot go on."""

    exit_code = 4


class DiskError(TrainingError):
    """A file of a run or an evaluation cannot be read or written."""


class LostProcessError(TrainingError):
    """Another process of this run has ended. Unless it was killed, it has said why.

    Its exit code is the lowest, since `srun` reports the highest of all processes': that of the one that failed.
    """

    exit_code = 1

    @classmethod
    def shown_by(cls, error: RuntimeError) -> Self:
        """Make it of what a collective operation raised.

        Args:
            error: Of the transport.
        """
        reason = str(error).strip().partition("\n")[0]
        return cls(
            f"another process of this run has ended: {reason}",
            hint="if it did not say why, it was killed: is there enough memory?",
        )


class CheckpointError(GrpoError):
    """A checkpoint cannot be written, or none can be read."""

    exit_code = 5


class Interrupted(BaseException):
    """A signal asked the run to stop.

    Args:
        signal_number: 2 (SIGINT) or 15 (SIGTERM).
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.signal_number).name}"
