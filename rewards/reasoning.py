r"""Rewards on the answers to generated reasoning tasks, by the tasks' own scorers.

They read the column `entry` of `grpo_cli.data.reasoning.questions`; None where a row has none. Scorers run in a process of their
own, with a time limit that no answer can outrun, and with the rights of the run: tasks whose scorers run an answer as Python are refused.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Literal

from rewards.accuracy import last_boxed
from rewards.answering import AnsweringProcess
from rewards.independence import independent
from rewards.text import Completion, text_of

Extraction = Literal["tags", "boxed", "number", "text"]
"""Where the answer stands: in the last `<answer>...</answer>` or `\\boxed{...}`, the last number, or all of the text."""

EVALUATING = frozenset(
    {
        *("binary_matrix", "n_queens", "spiral_matrix", "string_insertion", "countdown", "puzzle24"),
        *("polynomial_multiplication", "simple_integration", "intermediate_integration"),
    }
)
"""Tasks whose scorers run an answer as Python, directly or by sympy (reasoning-gym 0.1.25)."""

_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_NUMBER = re.compile(r"(?<!\w)-?\d+(?:,\d{3})*(?:\.\d+)?")

_SCORERS = AnsweringProcess("reasoning_process.py", needs="reasoning-gym")


@independent
def correct(
    completions: Sequence[Completion],
    entry: Sequence[str | None],
    *,
    extraction: Extraction = "tags",
    allow_unconfined: bool = False,
    log_extra: Callable[[str, Sequence[Any]], None] | None = None,
    **_: Any,
) -> list[float | None]:
    r"""Reward an answer that its task's own scorer gives the full score: 1, else 0; 0 without an answer.

    Answers are logged as the column `answer`.

    Source: reasoning-gym (Stojanovski et al. 2025, arXiv 2505.24760), which says what is right in each of its tasks.

    Args:
        completions: Strings, or lists of messages.
        entry: What the scorers need, as JSON; None for rows of another kind.
        extraction: Where the answer stands: `tags` (the last `<answer>...</answer>`), `boxed` (the last `\boxed{...}`), `number` (the last
            number, without commas between thousands), or `text` (all of it).
        allow_unconfined: Score tasks of `EVALUATING`, too. Only where what a model writes may do no harm.
        log_extra: Takes the column of answers.

    Raises:
        ValueError: If `extraction` is none of these, reasoning-gym has no such task, or its scorer would run the answer.
        ModuleNotFoundError: If reasoning-gym is not installed.
    """
    scores = score(completions, entry, extraction=extraction, allow_unconfined=allow_unconfined, log_extra=log_extra)
    return [None if each is None else float(each >= 1) for each in scores]


@independent
def score(
    completions: Sequence[Completion],
    entry: Sequence[str | None],
    *,
    extraction: Extraction = "tags",
    allow_unconfined: bool = False,
    log_extra: Callable[[str, Sequence[Any]], None] | None = None,
    **_: Any,
) -> list[float | None]:
    """Reward an answer with the score that its task's own scorer gives: 1 if it is right, often something for a part of it.

    Some tasks give up to 0.05 to any answer at all. 0 without an answer. Answers are logged as the column `answer`.

    Source: as `correct`.

    Args:
        completions: As in `correct`.
        entry: As in `correct`.
        extraction: As in `correct`.
        allow_unconfined: As in `correct`.
        log_extra: As in `correct`.

    Raises:
        ValueError: As `correct`.
        ModuleNotFoundError: As `correct`.
    """
    if extraction not in _EXTRACTIONS:
        raise ValueError(f"extraction is {extraction!r}; allowed is {', '.join(map(repr, _EXTRACTIONS))}")
    if find_spec("reasoning_gym") is None:
        raise ModuleNotFoundError("reasoning-gym is not installed: pip install 'grpo-cli[reasoning]'")
    answers = [_EXTRACTIONS[extraction](text_of(completion)) for completion in completions]
    if log_extra is not None:
        log_extra("answer", answers)
    entries = [None if one is None else json.loads(one) for one in entry]
    if not allow_unconfined:
        _refuse_evaluating({one["task"] for one in entries if one is not None})
    return [None if one is None else _score(one, answer) for one, answer in zip(entries, answers, strict=True)]


def _refuse_evaluating(tasks: set[str]) -> None:
    for task in sorted(tasks & EVALUATING):
        raise ValueError(
            f"the scorer of {task!r} runs an answer as Python, with the rights of this process; allowed with `allow_unconfined: true`, "
            "where what a model writes may do no harm"
        )


def _score(entry: Mapping[str, Any], answer: str | None) -> float:
    if answer is None:
        return 0.0
    found = _SCORERS.ask({"entry": entry, "answer": answer})
    if found is None:  # it could not be scored in time, or ended the process
        return 0.0
    if "problem" in found:
        raise ValueError(found["problem"])
    return float(found["score"])


def _in_tags(text: str) -> str | None:
    found = _TAGS.findall(text)
    return found[-1].strip() if found else None


def _last_number(text: str) -> str | None:
    found = _NUMBER.findall(text)
    return found[-1].replace(",", "") if found else None


_EXTRACTIONS: Mapping[str, Callable[[str], str | None]] = {
    "tags": _in_tags,
    "boxed": last_boxed,
    "number": _last_number,
    "text": str.strip,
}
