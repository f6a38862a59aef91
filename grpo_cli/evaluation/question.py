"""What is asked of the completions of a dataset, and the answer in metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo_cli.evaluation.measures import Measure, Success, measures, successes
from grpo_cli.evaluation.sheet import Sheet


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is asked of a dataset's completions.

    Attributes:
        success_reward: The reward function that says which completions are correct; None: the first, if it gives 0 and 1 alone.
        threshold: The least reward of a correct completion.
        sizes: The k of pass@k.
        subsets: Of each prompt the value by which all is reported as well; None: by nothing.
    """

    success_reward: str | None
    threshold: float
    sizes: tuple[int, ...]
    subsets: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """The metrics of one dataset.

    Attributes:
        sheet: What they are of.
        success: Which completions are correct.
        metrics: By name.
        subsets: Numbers of the prompts of each subset, by its name.
    """

    sheet: Sheet
    success: Success
    metrics: Mapping[str, Measure]
    subsets: Mapping[str, Sequence[int]]


def answered(sheet: Sheet, question: Question) -> Results:
    """Compute all metrics of a dataset."""
    success = successes(sheet, question.success_reward, question.threshold)
    return Results(
        sheet=sheet,
        success=success,
        metrics=measures(sheet, success, question.sizes),
        subsets=_by_subset(question.subsets),
    )


def _by_subset(subsets: Sequence[str] | None) -> dict[str, list[int]]:
    """Give the numbers of the prompts of each subset, by alphabet."""
    found: dict[str, list[int]] = {}
    for number, name in enumerate(subsets or ()):
        found.setdefault(name, []).append(number)
    return dict(sorted(found.items()))
