"""Evaluations as a person sees them: numbers with intervals, models side by side, and how far it has come."""

from collections.abc import Callable
from typing import Any

from rich.console import Console

from grpo_cli.telemetry.evaluation_tables import print_evaluations
from grpo_cli.telemetry.evaluation_view import EvaluationView


def estimate(value: float | None, low: float | None = None, high: float | None = None) -> dict[str, Any]:
    return {"value": value, "low": low, "high": high, "prompts": 3, "count": 6}


SUCCESS = {"reward": "close", "threshold": 0.5}


def document(label: str, value: float, success: dict[str, Any] | None = None, **subsets: Any) -> dict[str, Any]:
    metrics = {
        "reward": estimate(value, value - 0.25, value + 0.25),
        "reward/[red]x/mean": estimate(None),
        "pass@2": estimate(1.0),
    }
    report = {"prompts": 3, "num_generations": 2, "notes": ["a note"], "metrics": metrics, "subsets": subsets}
    report["success"] = success
    return {"label": label, "confidence": 0.95, "datasets": {"math": report}}


def test_models_stand_side_by_side_with_their_difference(plain_console: Console, written: Callable[[], str]) -> None:
    differences = {"b": {"math": {"metrics": {"reward": estimate(0.5, 0.125, 0.75)}}}}
    print_evaluations(plain_console, [document("a", 0.25), document("b", 0.75)], differences)
    assert [line.rstrip() for line in written().splitlines()] == [
        "math: 3 prompts x 2 completions, 95 % intervals",
        "",
        "  metric                           a               b                b - a",
        " ─────────────────────────────────────────────────────────────────────────",
        "  reward               0.25 [0, 0.5]   0.75 [0.5, 1]   +0.5 [0.125, 0.75]",
        "  reward/[red]x/mean               -               -                    -",
        "  pass@2                           1               1                    -",
        "",
        "  a note",
    ]


def test_subsets_show_the_metrics_that_matter_most(plain_console: Console, written: Callable[[], str]) -> None:
    metrics = {name: estimate(0.5) for name in ("reward", "reward/a/mean", "avg@2", "completions/mean_length")}
    differences = {"b": {"math": {"metrics": {}, "subsets": {"hard": {"avg@2": estimate(-0.25, -0.5, -0.125)}}}}}
    print_evaluations(plain_console, [document("a", 0.25, hard=metrics), document("b", 0.5, hard=metrics)], differences)
    lines = [line.rstrip() for line in written().splitlines()]
    assert lines[lines.index("math by subset") + 1 :] == [
        "",
        "  subset   prompts   metric     a     b                  b - a",
        " ──────────────────────────────────────────────────────────────",
        "  hard     3         reward   0.5   0.5                      -",
        "                     avg@2    0.5   0.5   -0.25 [-0.5, -0.125]",
        "",
        "  a note",
    ]


def test_what_only_a_later_model_has_is_shown_with_what_counts_as_correct(
    plain_console: Console, written: Callable[[], str]
) -> None:
    later = document("b", 0.75, SUCCESS, hard={"reward": estimate(0.5), "avg@2": estimate(0.25)})
    later["datasets"]["math"]["metrics"]["maj@2"] = estimate(0.625)
    differences: dict[str, Any] = {"b": {"math": {"metrics": {}, "subsets": {}}}}
    print_evaluations(plain_console, [document("a", 0.25, hard={"reward": estimate(0.5)}), later], differences)
    output = written()
    assert "math: 3 prompts x 2 completions, 95 % intervals, correct: close >= 0.5\n" in output
    lines = [line.split() for line in output.splitlines()]
    assert ["maj@2", "-", "0.625", "-"] in lines
    assert ["avg@2", "-", "0.25", "-"] in lines


def test_a_log_says_when_a_dataset_is_sampled(plain_console: Console, written: Callable[[], str]) -> None:
    view = EvaluationView(plain_console)
    view.begin("[b]math", total=3)
    view.sampled(2)
    view.sampled(1)
    view.warn("a reward failed")
    view.close()
    assert written() == "[b]math: 3 of 3 prompts\nwarning: a reward failed\n"
