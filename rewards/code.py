"""Programs in completions, run against tests in confined processes."""

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from rewards.confinement.choice import choose
from rewards.confinement.limits import Limits
from rewards.confinement.sandbox import ConfinementError
from rewards.programs.blocks import last_python_block
from rewards.programs.cases import Case, cases_of
from rewards.programs.judging import Verdict, judge
from rewards.text import Completion, text_of

_MIB = 1 << 20
_MAX_TOTAL_MIB = 6 << 10
"""Of the programs that run at the same time, unless it is said how many: a worker process may use 8 GiB with all that it started."""


class PassedTests:
    """Reward the share of tests that a Python program passes; 0 without a program, None without tests for Python.

    The program is what stands in the last complete block that is marked as Python. It runs in a process that the operating system
    confines: no network, no files but the interpreter's and a folder of its own, no environment, no signals to others, no
    processes, and limits on processor time, memory, threads, output, disk and time. Which layers do this is found out when the
    reward is made, by trying to break out; where one of these cannot be closed, it is not made.

    Tests that call functions run in a process of their own, which asks the program's for plain values. A program passes no test by
    leaving early, by objects that equal everything, or by changing what tests use. It can still know the tests' inputs by
    heart, which no confinement prevents.

    Source: the share of passed tests of APPS (Hendrycks et al. 2021, arXiv 2105.09938, section 4); the columns are those of APPS,
    MBPP and of Open-R1's verifiable coding problems.

    Args:
        timeout_seconds: For one test.
        max_seconds: For all tests of one program; those that are left then count as failed.
        max_call_seconds: For one call; programs that are left then count as failed, because of `time`. The recipe's `timeout` has to be
            longer, or a call with many programs that hang would be lost.
        max_memory_mib: Address space of a process.
        max_output_mib: Standard output and error of a process together; where a test expects more than half of that, twice what it expects.
        max_disk_mib: Files of a process together.
        all_or_nothing: 1 if all tests pass, else 0.
        without_block: What a completion without a block is: `fail`, or `text`: the whole text is the program.
        concurrency: Programs that run at the same time. If None, as many as this process may use processors, and as fit into 6 GiB by
            `max_memory_mib`; the recipe's `memory_limit` has to be above what they may use together.
        allow_unconfined: Run programs even where they cannot be confined. Only for programs that you would run yourself.

    Raises:
        ValueError: If a number is not positive, or `without_block` unknown.
        RuntimeError: If programs cannot be confined here, and `allow_unconfined` is false.
    """

    isolated = True
    """Better called in a process that is no trainer's."""

    def __init__(
        self,
        *,
        timeout_seconds: float = 5.0,
        max_seconds: float = 30.0,
        max_call_seconds: float = 240.0,
        max_memory_mib: int = 1024,
        max_output_mib: int = 1,
        max_disk_mib: int = 16,
        all_or_nothing: bool = False,
        without_block: Literal["fail", "text"] = "fail",
        concurrency: int | None = None,
        allow_unconfined: bool = False,
    ) -> None:
        numbers = {
            "timeout_seconds": timeout_seconds,
            "max_seconds": max_seconds,
            "max_call_seconds": max_call_seconds,
            "max_memory_mib": max_memory_mib,
            "max_output_mib": max_output_mib,
            "max_disk_mib": max_disk_mib,
            "concurrency": 1 if concurrency is None else concurrency,
        }
        for name, number in numbers.items():
            if number <= 0:
                raise ValueError(f"{name} is {number}; allowed is a number above 0")
        if without_block not in {"fail", "text"}:
            raise ValueError(f"without_block is {without_block!r}; allowed is 'fail' or 'text'")
        self._timeout_seconds, self._max_seconds = timeout_seconds, max_seconds
        self._max_call_seconds = max_call_seconds
        self._all_or_nothing, self._without_block = all_or_nothing, without_block
        self._concurrency = concurrency or min(_usable_processors(), max(1, _MAX_TOTAL_MIB // max_memory_mib))
        self._choice = choose(
            Limits(
                max_memory_bytes=max_memory_mib * _MIB,
                max_output_bytes=max_output_mib * _MIB,
                max_disk_bytes=max_disk_mib * _MIB,
            )
        )
        if self._choice.open and not allow_unconfined:
            raise ConfinementError(
                f"programs cannot be confined on this machine: {self._choice.describe()}. Install bubblewrap, or run where user "
                f"namespaces or Landlock (Linux 5.13) are allowed; `allow_unconfined: true` runs them all the same"
            )

    def describe(self) -> str:
        """Say what confines the programs."""
        return f"programs run {self._choice.describe()}"

    def __call__(
        self,
        completions: Sequence[Completion],
        tests: Sequence[Any] | None = None,
        verification_info: Sequence[Any] | None = None,
        entry_point: Sequence[str | None] | None = None,
        log_extra: Callable[[str, Sequence[Any]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **_: Any,
    ) -> list[float | None]:
        """Run the programs of all completions.

        Args:
            completions: Strings, or lists of messages.
            tests: Column with the tests, in the forms of `rewards.programs.cases.cases_of`.
            verification_info: Column in Open-R1's form, preferred where it is not None.
            entry_point: Column with the names of the functions that are tested, for tests that define `check(candidate)`.
            log_extra: Takes the columns `tests_passed` (such as `2/3`) and `tests_failed` (why, each reason once).
            log_metric: Takes `code/passed` (share of tests), `code/all_passed`, `code/no_program`, and the shares of tests that ended in
                `code/timeout`, `code/memory` and `code/error`.

        Raises:
            ValueError: If neither column is there, or a row's tests have another form.
            ConfinementError: If a process cannot be confined any more.
        """
        if tests is None and verification_info is None:
            raise ValueError("needs a dataset column `tests` or `verification_info`")
        nothing = [None] * len(completions)
        rows = zip(tests or nothing, verification_info or nothing, entry_point or nothing, strict=True)
        cases = [_cases(index, *row) for index, row in enumerate(rows)]
        deadline = time.monotonic() + self._max_call_seconds
        with ThreadPoolExecutor(self._concurrency, thread_name_prefix="programs") as pool:
            verdicts = list(pool.map(self._verdicts, completions, cases, [deadline] * len(cases)))
        if log_extra is not None:
            log_extra("tests_passed", [_count(each) for each in verdicts])
            log_extra("tests_failed", [_reasons(each) for each in verdicts])
        if log_metric is not None:
            _log_shares(log_metric, [each for each in verdicts if each is not None])
        return [None if each is None else self._reward(each) for each in verdicts]

    def _verdicts(self, completion: Completion, cases: list[Case] | None, deadline: float) -> list[Verdict] | None:
        """Judge one completion by the deadline; None where there is nothing to judge by."""
        if cases is None:
            return None
        text = text_of(completion)
        source = last_python_block(text)
        if source is None and self._without_block == "text":
            source = text
        if source is None:
            return [Verdict(passed=False, why="no program")] * len(cases)
        max_seconds = min(self._max_seconds, deadline - time.monotonic())
        if max_seconds <= 0:
            return [Verdict(passed=False, why="time")] * len(cases)
        return judge(self._choice.sandbox, source, cases, seconds=self._timeout_seconds, max_seconds=max_seconds)

    def _reward(self, verdicts: Sequence[Verdict]) -> float:
        share = sum(each.passed for each in verdicts) / len(verdicts)
        return float(share == 1) if self._all_or_nothing else share


def _cases(index: int, tests: Any, verification_info: Any, entry_point: str | None) -> list[Case] | None:
    """Read the tests of a row.

    Raises:
        ValueError: If they have no form that is known; it names the row.
    """
    try:
        return cases_of(tests, verification_info, entry_point)
    except ValueError as error:
        raise ValueError(f"row {index}: {error}") from error


def _usable_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _count(verdicts: Sequence[Verdict] | None) -> str | None:
    return None if verdicts is None else f"{sum(each.passed for each in verdicts)}/{len(verdicts)}"


def _reasons(verdicts: Sequence[Verdict] | None) -> str | None:
    return None if verdicts is None else "; ".join(dict.fromkeys(each.why for each in verdicts if not each.passed))


def _log_shares(log_metric: Callable[[str, float], None], verdicts: Sequence[Sequence[Verdict]]) -> None:
    if not verdicts:
        return
    ends = Counter("passed" if each.passed else each.why.partition(":")[0] for row in verdicts for each in row)
    for end in ("passed", "timeout", "memory", "error"):
        log_metric(f"code/{end}", ends[end] / ends.total())
    log_metric("code/all_passed", sum(all(each.passed for each in row) for row in verdicts) / len(verdicts))
    log_metric("code/no_program", sum(row[0].why == "no program" for row in verdicts) / len(verdicts))
