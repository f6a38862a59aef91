"""Dotted paths: what is found without running it, what is not, and that importing agrees."""

import sys
from pathlib import Path

import pytest

from grpo_cli.errors import RecipeError
from grpo_cli.recipe.imports import is_dotted_path, locate, resolve

MODULE = """\
import json
from math import sqrt as root
raise_if_imported = 1 / 0

LIMIT: int = 3
FIRST, (SECOND, *REST) = 1, (2, 3)

def score(): ...
async def score_slowly(): ...

class Judge:
    def grade(self): ...

if LIMIT:
    try:
        import numpy as fast
    except ImportError:
        fallback = None
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recipe's folder, inside the working folder. `sys.path` and `sys.modules` are put back after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    (tmp_path / "recipes").mkdir()
    return tmp_path / "recipes"


@pytest.mark.parametrize(
    "name",
    [
        "json",
        "root",
        "LIMIT",
        "FIRST",
        "SECOND",
        "REST",
        "score",
        "score_slowly",
        "Judge",
        "Judge.grade",
        "fast",
        "fallback",
    ],
)
def test_names_are_found_without_running_the_module(name: str, folder: Path) -> None:
    (folder / "plain_names.py").write_text(MODULE)
    assert locate(f"plain_names.{name}", folder) is None
    assert "plain_names" not in sys.modules


def test_names_inside_a_function_or_a_class_are_not_the_modules(folder: Path) -> None:
    (folder / "inner_names.py").write_text("def outer():\n    hidden = 1\n\nclass Judge:\n    level = 2\n")
    assert locate("inner_names.hidden", folder) == "`inner_names` has no `hidden` (it has outer, Judge)"
    assert locate("inner_names.level", folder) == "`inner_names` has no `level` (it has outer, Judge)"


@pytest.mark.parametrize("text", ["from os.path import *\n", "def __getattr__(name): ...\n"])
def test_what_reading_cannot_tell_counts_as_found(text: str, folder: Path) -> None:
    (folder / "open_names.py").write_text(text)
    assert locate("open_names.anything", folder) is None


@pytest.mark.parametrize("dotted", ["math.sqrt", "json.dumps", "json:dumps", "os.path.join", "_json.anything"])
def test_installed_modules_are_found(dotted: str, folder: Path) -> None:
    assert locate(dotted, folder) is None


def test_packages_and_their_modules_are_followed_without_running_them(folder: Path) -> None:
    (folder / "deep_pack").mkdir()
    (folder / "deep_pack/__init__.py").write_text("raise RuntimeError\n")
    (folder / "deep_pack/lengths.py").write_text("def close_to(): ...\n")
    (folder / "bare_pack").mkdir()
    (folder / "bare_pack/lengths.py").write_text("def close_to(): ...\n")
    assert locate("deep_pack.lengths.close_to", folder) is None
    assert locate("bare_pack.lengths.close_to", folder) is None
    assert locate("deep_pack.lenghts.close_to", folder) == "`deep_pack` has no `lenghts` (did you mean `lengths`?)"
    assert (
        locate("deep_pack.lengths", folder)
        == "`deep_pack.lengths` is a module; allowed: a name in it (it has close_to)"
    )


@pytest.mark.parametrize("dotted", ["score", "", "a..b", ".a", "a.b-c", "a/b.c"])
def test_what_is_no_dotted_path_is_refused(dotted: str, folder: Path) -> None:
    assert locate(dotted, folder) == "allowed: a dotted path, such as package.module.function"


def test_a_module_with_a_syntax_error_is_reported_with_its_line(folder: Path) -> None:
    (folder / "broken_syntax.py").write_text("x = 1\ndef f(:\n")
    assert locate("broken_syntax.f", folder) == f"{folder}/broken_syntax.py:2: invalid syntax"


def test_the_recipes_folder_comes_before_the_working_folder_and_both_before_what_is_installed(folder: Path) -> None:
    (folder / "first_come.py").write_text("value = 'recipe'\n")
    (folder.parent / "first_come.py").write_text("value = 'working'\n")
    (folder.parent / "second_come.py").write_text("value = 'working'\n")
    (folder / "yaml.py").write_text("value = 'recipe'\n")
    assert resolve("first_come.value", folder) == "recipe"
    assert resolve("second_come.value", folder) == "working"
    assert locate("yaml.value", folder) is None


def test_a_module_is_never_mistaken_for_another_of_its_name(folder: Path) -> None:
    import yaml

    (folder / "yaml.py").write_text("value = 1\n")
    with pytest.raises(RecipeError, match=f"has the name of another module, {yaml.__file__}: rename it"):
        resolve("yaml.value", folder)


def test_what_is_located_can_be_imported(folder: Path) -> None:
    (folder / "importable.py").write_text("class Judge:\n    def grade(self): return 7\n")
    assert resolve("importable.Judge.grade", folder)(None) == 7
    assert resolve("importable:Judge", folder).__name__ == "Judge"
    assert resolve("math.sqrt", folder)(9) == 3


def test_an_error_while_importing_is_shown(folder: Path) -> None:
    (folder / "needs_more.py").write_text("import surely_not_installed\ndef f(): ...\n")
    with pytest.raises(RecipeError) as caught:
        resolve("needs_more.f", folder)
    expected = "needs_more.f: importing `needs_more` raised ModuleNotFoundError: No module named 'surely_not_installed'"
    assert str(caught.value) == expected
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_what_only_importing_can_tell_is_told_with_the_nearest_name(folder: Path) -> None:
    (folder / "dynamic_names.py").write_text("from json import *\n")
    with pytest.raises(RecipeError, match=r"`dynamic_names` has no `dumpss` \(did you mean `dumps`\?\)"):
        resolve("dynamic_names.dumpss", folder)


def test_what_cannot_be_located_is_not_imported(folder: Path) -> None:
    with pytest.raises(RecipeError, match="no module `nowhere_at_all`"):
        resolve("nowhere_at_all.f", folder)


def test_a_dataset_name_is_a_dotted_path_only_if_its_module_exists(folder: Path) -> None:
    (folder / "own_data.py").write_text("def rows(): ...\n")
    (folder / "math.csv.gz").touch()
    assert is_dotted_path("own_data.rows", folder)
    assert is_dotted_path("own_data.missing", folder)
    assert not is_dotted_path("own_data", folder)
    assert not is_dotted_path("some.thing", folder)
    assert not is_dotted_path("org/data.v1", folder)
    assert not is_dotted_path("own_data.jsonl", folder)
    assert not is_dotted_path("math.csv.gz", folder)
