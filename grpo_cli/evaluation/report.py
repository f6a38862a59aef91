"""An evaluation as plain data, for eval.json and for tables."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_cli.evaluation.intervals import Interval, difference, interval
from grpo_cli.evaluation.measures import Measure
from grpo_cli.evaluation.question import Results


def dataset_report(results: Results, *, seed: int) -> dict[str, Any]:
    """Write the metrics of a dataset with their intervals. JSON has no NaN: null stands where there is nothing to tell."""
    sheet = results.sheet
    success = results.success
    return {
        "prompts": len(sheet.uids),
        "completions": sheet.lengths.size,
        "num_generations": sheet.num_generations,
        "success": None if success.values is None else {"reward": success.reward, "threshold": success.threshold},
        "notes": [*_notes(results)],
        "metrics": _estimates(results.metrics, seed),
        "subsets": {
            name: _estimates({metric: one.select(prompts) for metric, one in results.metrics.items()}, seed)
            for name, prompts in results.subsets.items()
        },
    }


def _notes(results: Results) -> Iterator[str]:
    """Say what is missing, and why, and what is not what it looks like."""
    if results.success.note is not None:
        yield results.success.note
    if results.success.values is not None and results.sheet.answers is None:
        yield "no reward function logs the answers (eval.answer_column), and eval.answer_function is not set: no majority vote"
    prompts = {name: int((one.counts > 0).sum()) for name, one in results.metrics.items() if name.startswith("pass@")}
    if len(set(prompts.values())) > 1:
        counts = ", ".join(f"{name} over {count:,}" for name, count in prompts.items())
        yield f"not all are over the same prompts, since some completions have no reward: {counts}"


def compared(ours: Results, theirs: Results, *, seed: int) -> dict[str, Any]:
    """Write by how much each metric is larger than another model's, over the prompts that both have.

    Args:
        ours: Of one model.
        theirs: Of the model that it is compared with.
        seed: Of the intervals.
    """
    numbers = {uid: number for number, uid in enumerate(theirs.sheet.uids)}
    both = {number: numbers[uid] for number, uid in enumerate(ours.sheet.uids) if uid in numbers}
    return {
        "prompts": len(both),
        "metrics": _differences(ours, theirs, both, seed=seed),
        "subsets": {
            name: _differences(ours, theirs, {one: both[one] for one in prompts if one in both}, seed=seed)
            for name, prompts in ours.subsets.items()
        },
    }


def _differences(ours: Results, theirs: Results, pairs: Mapping[int, int], *, seed: int) -> dict[str, Any]:
    """Compare all metrics that both have on some prompts, given by their numbers there and here."""
    found = {
        name: difference(measure.select([*pairs]), theirs.metrics[name].select([*pairs.values()]), seed=seed)
        for name, measure in ours.metrics.items()
        if name in theirs.metrics
    }
    return {
        name: _told({"value": one.value, **_bounds(one.interval), "prompts": one.prompts})
        for name, one in found.items()
    }


def _estimates(found: Mapping[str, Measure], seed: int) -> dict[str, Any]:
    return {
        name: _told(
            {
                "value": measure.value,
                **_bounds(interval(measure, seed=seed)),
                "prompts": int((measure.counts > 0).sum()),
                "count": int(measure.counts.sum()),
            }
        )
        for name, measure in found.items()
    }


def _bounds(found: Interval | None) -> dict[str, float | None]:
    return {"low": None, "high": None} if found is None else {"low": found[0], "high": found[1]}


def _told(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }
