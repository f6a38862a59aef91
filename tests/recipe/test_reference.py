"""The table of keys shows every key of the schema once, and can be renewed in a document."""

from pathlib import Path

import pytest

from grpo_cli.errors import GrpoError
from grpo_cli.recipe.reference import key_table, main, replace_between_markers


def rows_of(section: str) -> dict[str, list[str]]:
    """Read the rows of one table back: key to the cells after it."""
    _, _, rest = key_table().partition(f"#### {section}\n")
    lines = rest.partition("####")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| `")]
    return {row[0].strip("`"): row[1:] for row in rows}


def test_a_row_shows_what_is_allowed_the_default_and_the_meaning() -> None:
    grpo = rows_of("`grpo`")
    assert grpo["num_generations"][:2] == ["an integer, at least 2", "`8`"]
    assert grpo["loss_type"][:2] == ["grpo, bnpo, dr_grpo, dapo, cispo, sapo, luspo, vespo", "`dapo`"]
    assert grpo["epsilon_high"][:2] == ["a number, above 0, or null", "`null`"]
    assert rows_of("`train`")["learning_rate"][1] == "`1e-06`"
    assert rows_of("`train`")["bf16"][:2] == ["true or false", "`false`"]
    assert all(len(row) == 3 and row[2].endswith(".") for row in grpo.values())


def test_required_keys_are_marked() -> None:
    required = {key for key, row in {**rows_of("`model`"), **rows_of("`rewards`")}.items() if row[1] == "**required**"}
    assert required == {"name_or_path", "reward_funcs"}


def test_every_section_has_a_table() -> None:
    titles = [line.removeprefix("#### ") for line in key_table().splitlines() if line.startswith("####")]
    sections = [
        "model",
        "model.lora",
        "dataset",
        "rewards",
        "rewards.reward_funcs[]",
        "grpo",
        "generation",
        "vllm",
        "train",
        "eval",
        "eval.datasets.NAME",
        "eval.success",
        "distributed",
        "logging",
    ]
    assert titles == ["top level", *(f"`{section}`" for section in sections)]
    assert set(rows_of("`rewards.reward_funcs[]`")) == {
        "path",
        "model",
        "name",
        "parameters",
        "isolated",
        "timeout",
        "memory_limit",
        "per_prompt",
        "concurrency",
        "calls_per_minute",
        "retries",
        "batch_size",
        "max_length",
    }


def test_a_section_does_not_repeat_the_keys_that_it_has_from_another() -> None:
    named = rows_of("`eval.datasets.NAME`")
    assert "reward_funcs" in named
    assert "split" in rows_of("`dataset`")
    assert "split" not in named


def test_only_what_is_between_the_markers_is_replaced() -> None:
    text = "before\n<!-- keys:begin -->\nold\n<!-- keys:end -->\nafter\n"
    assert replace_between_markers(text, "keys", "new") == text.replace("old", "new")


@pytest.mark.parametrize("text", ["", "<!-- keys:begin -->", "<!-- keys:end --><!-- keys:begin -->"])
def test_missing_markers_are_an_error(text: str) -> None:
    with pytest.raises(GrpoError, match="<!-- keys:begin -->"):
        replace_between_markers(text, "keys", "new")


def test_a_table_that_is_out_of_date_is_found_and_renewed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("<!-- keys:begin -->\nold\n<!-- keys:end -->\n")
    assert main([str(readme), "--check"]) == 1
    assert capsys.readouterr().err == f"{readme}: the table of keys is out of date; run with --write\n"
    assert main([str(readme), "--write"]) == 0
    assert main([str(readme), "--check"]) == 0
    assert key_table() in readme.read_text()
