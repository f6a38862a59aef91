"""Recipes that are wrong, and every word of what is said about them.

The tables are in `bad/*.txt`. A case is a title after `===`, the lines of a recipe that extends `good.yaml` (so that they count
from 2), overrides after `$`, and the expected report after `>`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

Report = Callable[..., str]

TABLES = sorted((Path(__file__).parent / "bad").glob("*.txt"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    title: str
    recipe: str
    overrides: tuple[str, ...]
    expected: str


def read_cases(table: Path) -> Iterator[Case]:
    for text in table.read_text(encoding="utf-8").split("=== ")[1:]:
        title, *lines = text.splitlines()
        yield Case(
            title=f"{table.stem}: {title}",
            recipe="".join(f"{line}\n" for line in lines if line and line[:2] not in ("$ ", "> ")),
            overrides=tuple(line[2:] for line in lines if line.startswith("$ ")),
            expected="\n".join(line[2:] for line in lines if line.startswith("> ")),
        )


CASES = [case for table in TABLES for case in read_cases(table)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_report_is(case: Case, report: Report, recipe_folder: Path) -> None:
    assert report(case.recipe, *case.overrides) == case.expected.replace("{folder}", str(recipe_folder))


def test_table_is_large_and_its_titles_differ() -> None:
    assert len({case.title for case in CASES}) == len(CASES) >= 55
    assert all(case.expected for case in CASES)
