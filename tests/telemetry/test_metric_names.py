"""The table of metric names: its order, its patterns, its Markdown, and the command that keeps the README in step."""

import subprocess
import sys
from pathlib import Path

import pytest

from grpo_cli.telemetry.names import TABLE, find, in_table_order, main, metric_table

README = "# Metrics\n\n<!-- metrics:begin -->\nold\n<!-- metrics:end -->\n\nthe end\n"


def test_names_are_sorted_as_in_the_table_and_unknown_ones_come_last() -> None:
    names = ["zeta", "time/score", "reward/b/std", "reward/b/mean", "alpha", "reward/a/mean", "kl", "reward"]
    expected = ["reward", "reward/a/mean", "reward/b/mean", "reward/b/std", "kl", "time/score", "alpha", "zeta"]
    assert in_table_order(names) == expected
    assert in_table_order(reversed(names)) == expected
    assert in_table_order(f"eval/{name}" for name in names) == [f"eval/{name}" for name in expected]


def test_every_row_is_found_by_its_own_name_and_by_no_other_row() -> None:
    for row in TABLE:
        name = row.name.replace("{name}", "length").replace("{k}", "16")
        assert find(name) is row
        assert find(f"eval/{name}") is row
        assert find(f"eval/math/{name}") is row
        assert find(f"math/{name}") is None
    assert find("my_metric") is None
    assert find("eval/math/my_metric") is None
    assert find("pass@many") is None
    assert len({row.name for row in TABLE}) == len(TABLE)


def test_the_markdown_table_has_a_row_per_metric_and_no_stray_cells() -> None:
    lines = metric_table().splitlines()
    assert len(lines) == len(TABLE) + 2
    assert {line.count("|") for line in lines} == {5}


def test_write_renews_the_table_and_check_then_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(README)
    assert main([str(readme), "--check"]) == 1
    assert capsys.readouterr().err == f"{readme}: the table of metrics is out of date; run with --write\n"
    assert main([str(readme), "--write"]) == 0
    assert main([str(readme), "--check"]) == 0
    text = readme.read_text()
    assert metric_table() in text
    assert text.startswith("# Metrics\n\n<!-- metrics:begin -->")
    assert text.endswith("<!-- metrics:end -->\n\nthe end\n")


def test_the_table_needs_no_torch() -> None:
    program = "import sys, grpo_cli.telemetry.names; print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "False\n"
    )
