"""Questions of reasoning tasks that are generated, not downloaded: what `dataset.name: grpo_cli.data.reasoning.questions` means.

The tasks are those of reasoning-gym (Stojanovski et al. 2025, arXiv 2505.24760), which is an optional package. The rewards of
`rewards.reasoning` judge the answers.
"""

import dataclasses
import hashlib
import importlib.util
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, cast

from datasets import Dataset

from grpo_cli.errors import DataError
from grpo_cli.recipe.suggest import did_you_mean

_HELD_OUT = 5
"""One question in so many is held out, whatever the seed."""

_PATIENCE = 1000
"""Draws in a row without a new question after which a task counts as exhausted."""

_GIVEN = ("seed", "size")
"""Settings of every task that are said once for all of them."""

_BLOCK = 1000
"""Questions of one of reasoning-gym's generators, some of which prepare for all of them at the start; then comes another one."""

_TASKS = "dataset.arguments.tasks"


def questions(
    *,
    tasks: Mapping[str, Mapping[str, Any] | None],
    size: int,
    seed: int = 0,
    held_out: bool = False,
    instruction: str | None = None,
) -> Dataset:
    """Generate questions, all of them different.

    Whether a question is held out depends on its own text only, so that training and held-out questions are never the same, whatever the
    other arguments are. (In reasoning-gym itself, seeds that are close to each other give nearly the same questions.) White space
    does not count.

    Args:
        tasks: Name of a task to its settings, as reasoning-gym calls both; a setting `weight` says how often the task is drawn, relative to
            the others: 1 if left out.
        size: Number of questions.
        seed: Other seeds give other questions in another order; the same one the same.
        held_out: Give held-out questions instead of those to train on.
        instruction: What is said after each question, such as how to write the answer.

    Returns:
        The columns `prompt` (one user message), `task` (its name), `answer` (one that is right; None where a
        task gives none), and `entry` (JSON, for the rewards).

    Raises:
        DataError: If reasoning-gym is not installed, has no such task or setting, or has not that many questions.
    """
    chosen = [_chosen(name, given) for name, given in _named(tasks).items()]
    if size < 1:
        raise DataError(f"dataset.arguments.size: found {size}; allowed: at least 1")
    streams = [_distinct(task, seed=seed, held_out=held_out) for task in chosen]
    drawn = Random(seed).choices(streams, [task.weight for task in chosen], k=size)
    return Dataset.from_list([_row(next(stream), instruction) for stream in drawn])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    """A task that questions are drawn from.

    Attributes:
        name: Reasoning-gym's.
        configuration: Its settings that are not left at their defaults.
        weight: How often it is drawn, relative to the others.
    """

    name: str
    configuration: Mapping[str, Any]
    weight: float

    @property
    def key(self) -> str:
        """Give the recipe's key."""
        return f"{_TASKS}.{self.name}"

    def entries(self, seed: int) -> Iterator[Mapping[str, Any]]:
        """Draw questions with answers and what else the scorer needs, without end.

        Raises:
            DataError: If the settings are not allowed.
        """
        task, configuration, *_ = _registry()[self.name]
        for block in itertools.count():
            # Not the seeds themselves: an item depends on the sum of seed and index, so that neighbours would give the same, one place on.
            own_seed = Random(f"{seed} {self.name} {block}").getrandbits(31)
            try:
                generator = task(configuration(**self.configuration, seed=own_seed, size=_BLOCK))
                yield from (generator[index] for index in range(_BLOCK))
            except Exception as error:
                reason = " ".join(str(error).split()) or type(error).__name__
                raise DataError(f"{self.key}: {reason}") from error


def _named(tasks: Any) -> Mapping[str, Any]:
    """Check that tasks are named and exist."""
    if not isinstance(tasks, Mapping) or not tasks:
        raise DataError(
            f"{_TASKS}: found {tasks!r}; allowed: task names, each with its settings",
            hint="for example {chain_sum: {max_terms: 2}}",
        )
    registry = _registry()
    for name in tasks:
        if name not in registry:
            raise DataError(f"{_TASKS}.{name}: reasoning-gym has no such task", hint=did_you_mean(str(name), registry))
    return tasks


def _chosen(name: str, given: Any) -> _Task:
    """Check the settings of a task by name; their values are for reasoning-gym to check."""
    if not isinstance(given, Mapping | None):
        raise DataError(f"{_TASKS}.{name}: found {given!r}; allowed: settings by name, or {{}}")
    fields = [field.name for field in dataclasses.fields(_registry()[name][1]) if field.name not in _GIVEN]
    settings = dict(given or {})
    weight = settings.pop("weight", 1)
    if not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise DataError(f"{_TASKS}.{name}.weight: found {weight!r}; allowed: a number above 0")
    for key in settings:
        if key not in fields:
            raise DataError(
                f"{_TASKS}.{name}.{key}: no such setting; allowed: weight, {', '.join(fields)}",
                hint=did_you_mean(str(key), ["weight", *fields]),
            )
    return _Task(name=name, configuration=settings, weight=float(weight))


def _registry() -> Mapping[str, Any]:
    """Give reasoning-gym's tasks by name: the class of the task, that of its configuration, and more."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise DataError(
            "dataset.name: grpo_cli.data.reasoning.questions needs reasoning-gym, which is not installed",
            hint="pip install 'grpo-cli[reasoning]'",
        )
    from reasoning_gym.factory import DATASETS  # noqa: PLC0415  optional package, and seconds to import

    return cast("Mapping[str, Any]", DATASETS)


def _distinct(task: _Task, *, seed: int, held_out: bool) -> Iterator[Mapping[str, Any]]:
    """Draw the questions of a task that belong to one side, each once.

    Raises:
        DataError: When there are no others.
    """
    seen: set[int] = set()
    idle = 0
    for entry in task.entries(seed):
        digest = _digest(entry["question"])
        idle += 1
        if (digest % _HELD_OUT == 0) == held_out and digest not in seen:
            seen.add(digest)
            idle = 0
            yield {"task": task.name, "configuration": task.configuration, **entry}
        if idle == _PATIENCE:
            break
    side = "to hold out" if held_out else "to train on"
    raise DataError(
        f"dataset.arguments.size: {task.name} has only {len(seen)} different questions {side} in its present configuration",
        hint=f"lower dataset.arguments.size, or widen {task.key}",
    )


def _digest(question: str) -> int:
    """Make a number of a question's text without its white space; the same on every machine."""
    return int.from_bytes(hashlib.blake2b("".join(question.split()).encode(), digest_size=16).digest())


def _row(entry: Mapping[str, Any], instruction: str | None) -> dict[str, Any]:
    question = entry["question"] if instruction is None else f"{entry['question']}\n{instruction}"
    return {
        "prompt": [{"role": "user", "content": question}],
        "task": entry["task"],
        "answer": entry["answer"],
        "entry": json.dumps(entry, default=str),  # fractions and dates of some tasks, which their scorers do not read
    }
