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
        seed: Of the intervals.
        subsets: Of each prompt the value by which all is reported as well; None: by nothing.
    """

    success_reward: str | None
    threshold: float
    sizes: tuple[int, ...]
    seed: int
    subsets: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """The measures of one dataset.

    Attributes:
        sheet: What they are of.
        success: Which completions are correct.
        whole: All metrics by name.
        parts: The same by subset.
    """

    sheet: Sheet
    success: Success
    whole: Mapping[str, Measure]
    parts: Mapping[str, Mapping[str, Measure]]


def answered(sheet: Sheet, question: Question) -> Results:
    """Compute all metrics of a dataset, and of each of its subsets."""
    success = successes(sheet, question.success_reward, question.threshold)
    return Results(
        sheet=sheet,
        success=success,
        whole=measures(sheet, success, question.sizes),
        parts={
            name: _part(sheet, success, question.sizes, prompts)
            for name, prompts in _by_subset(question.subsets).items()
        },
    )


def _part(sheet: Sheet, success: Success, sizes: tuple[int, ...], prompts: Sequence[int]) -> Mapping[str, Measure]:
    values = None if success.values is None else success.values[list(prompts)]
    return measures(sheet.select(prompts), Success(values=values, note=success.note), sizes)


def _by_subset(subsets: Sequence[str] | None) -> dict[str, list[int]]:
    """Give the numbers of the prompts of each subset, by alphabet."""
    found: dict[str, list[int]] = {}
    for number, name in enumerate(subsets or ()):
        found.setdefault(name, []).append(number)
    return dict(sorted(found.items()))
