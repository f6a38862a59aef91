r"""Rewards on the answers to generated reasoning tasks, by the tasks' own scorers.

They read the column `entry` of `grpo_cli.data.reasoning.questions`; None where a row has none. Scorers run in a process of their
own, with a time limit that no answer can outrun, and with the rights of the run: some of them evaluate an answer as Python.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Literal

from rewards.accuracy import last_boxed
from rewards.answering import AnsweringProcess
from rewards.text import Completion, text_of

Extraction = Literal["tags", "boxed", "number", "text"]
"""Where the answer stands: in the last `<answer>...</answer>` or `\\boxed{...}`, the last number, or all of the text."""

_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_NUMBER = re.compile(r"(?<!\w)-?\d+(?:,\d{3})*(?:\.\d+)?")

_SCORERS = AnsweringProcess("reasoning_process.py", needs="reasoning-gym")


def correct(
    completions: Sequence[Completion],
    entry: Sequence[str | None],
    *,
    extraction: Extraction = "tags",
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
        log_extra: Takes the column of answers.

    Raises:
        ValueError: If `extraction` is none of these, or reasoning-gym has no such task.
        ModuleNotFoundError: If reasoning-gym is not installed.
    """
    scores = score(completions, entry, extraction=extraction, log_extra=log_extra)
    return [None if each is None else float(each >= 1) for each in scores]


def score(
    completions: Sequence[Completion],
    entry: Sequence[str | None],
    *,
    extraction: Extraction = "tags",
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
    return [
        None if question is None else _score(question, answer) for question, answer in zip(entry, answers, strict=True)
    ]


def _score(entry: str, answer: str | None) -> float:
    if answer is None:
        return 0.0
    found = _SCORERS.ask({"entry": json.loads(entry), "answer": answer})
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
