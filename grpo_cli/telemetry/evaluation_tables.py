"""The outcome of `grpo eval` as tables: a dataset each, models side by side, and how they differ from the first."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo_cli.telemetry.readable import short, visible

WIDTH_OF_A_LOG = 240
"""Characters: a log has no width, and broken lines are hard to read there."""

_OF_SUCCESS = ("avg@", "pass@", "maj@")
"""Beginnings of the metrics that are shown by subset, besides the reward; eval.json has all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _SideBySide:
    """The columns that every table has.

    Attributes:
        labels: Of the models.
        compared: Of those that are compared with the first one.
    """

    labels: Sequence[str]
    compared: Sequence[str]

    def table(self, *headers: str) -> Table:
        """Make an empty table with columns of its own before a column for each model, and for each difference."""
        table = Table(box=box.SIMPLE_HEAD)
        for header in headers:
            table.add_column(header, overflow="fold")
        differences = [f"{label} - {self.labels[0]}" for label in self.compared]
        for label in (*self.labels, *differences):
            table.add_column(Text(visible(label)), justify="right", overflow="fold")
        return table


def print_evaluations(
    console: Console, documents: Sequence[Mapping[str, Any]], differences: Mapping[str, Mapping[str, Any]]
) -> None:
    """Print the tables of one or several models that were evaluated on the same datasets.

    Args:
        console: Where to.
        documents: What eval.json holds, of each model.
        differences: By label of every model but the first, what comparison.json holds.
    """
    if not console.is_terminal:
        console.width = max(console.width, WIDTH_OF_A_LOG)
    confidence = f"{100 * documents[0]['confidence']:.0f} % intervals"
    side = _SideBySide(labels=[document["label"] for document in documents], compared=[*differences])
    for dataset in documents[0]["datasets"]:
        reports = [document["datasets"][dataset] for document in documents]
        compared = [one[dataset] for one in differences.values()]
        sizes = {f"{report['prompts']:,} prompts x {report['num_generations']} completions" for report in reports}
        _print_title(console, f"{dataset}: {' or '.join(sorted(sizes))}, {confidence}{_correct(reports)}")
        console.print(_table(side, reports, compared))
        if reports[0]["subsets"]:
            _print_title(console, f"{dataset} by subset")
            console.print(_subset_table(side, reports, compared))
        for note in dict.fromkeys(note for report in reports for note in report["notes"]):
            console.print(Text(f"  {visible(note)}"), soft_wrap=True)


def _correct(reports: Iterable[Mapping[str, Any]]) -> str:
    """Say which completions are correct, if that is known of any model."""
    success = next((report["success"] for report in reports if report["success"] is not None), None)
    return "" if success is None else f", correct: {success['reward']} >= {success['threshold']:g}"


def _print_title(console: Console, title: str) -> None:
    console.print(Text(visible(title), style="bold"), soft_wrap=True)


def _table(side: _SideBySide, reports: Sequence[Mapping[str, Any]], compared: Sequence[Mapping[str, Any]]) -> Table:
    """Lay out the metrics of one dataset."""
    table = side.table("metric")
    for name in _of_any([report["metrics"] for report in reports]):
        estimates = [report["metrics"].get(name) for report in reports]
        paired = [one["metrics"].get(name) for one in compared]
        table.add_row(Text(visible(name)), *_cells(estimates, paired))
    return table


def _subset_table(
    side: _SideBySide, reports: Sequence[Mapping[str, Any]], compared: Sequence[Mapping[str, Any]]
) -> Table:
    """Lay out the metrics that matter most by subset."""
    table = side.table("subset", "prompts", "metric")
    for subset in _of_any([report["subsets"] for report in reports]):
        found = [report["subsets"].get(subset, {}) for report in reports]
        prompts = max(estimate["prompts"] for metrics in found for estimate in metrics.values())
        for number, name in enumerate(_shown(_of_any(found))):
            estimates = [metrics.get(name) for metrics in found]
            paired = [one["subsets"].get(subset, {}).get(name) for one in compared]
            table.add_row(
                Text("" if number else visible(subset)),
                Text("" if number else f"{prompts:,}"),
                Text(visible(name)),
                *_cells(estimates, paired),
            )
    return table


def _cells(estimates: Iterable[Mapping[str, Any] | None], paired: Iterable[Mapping[str, Any] | None]) -> Iterator[Text]:
    """Write what the models have, and their differences."""
    yield from (Text(_estimate(one)) for one in estimates)
    yield from (Text(_estimate(one, signed=True), style=_style(one)) for one in paired)


def _of_any(models: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name what any model has, each where the model with the most has it."""
    return [*dict.fromkeys(name for metrics in sorted(models, key=len, reverse=True) for name in metrics)]


def _shown(metrics: Iterable[str]) -> Iterator[str]:
    return (name for name in metrics if name == "reward" or name.startswith(_OF_SUCCESS))


def _estimate(estimate: Mapping[str, Any] | None, *, signed: bool = False) -> str:
    """Write a value and its interval; a dash where there is none."""
    if estimate is None or estimate["value"] is None:
        return "-"
    value = f"{estimate['value']:+.4g}" if signed else short(estimate["value"])
    if estimate["low"] is None:
        return value
    return f"{value} [{short(estimate['low'])}, {short(estimate['high'])}]"


def _style(estimate: Mapping[str, Any] | None) -> str:
    """Mark a difference whose interval leaves 0 out."""
    if estimate is None or estimate["low"] is None:
        return ""
    return "bold" if estimate["low"] > 0 or estimate["high"] < 0 else ""
