"""The rules that the code's structure follows, as far as no linter knows them."""

import ast
import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ("grpo_cli", "rewards", "recipes")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
TOP_LEVEL = {
    *("grpo_cli", "recipes", "rewards", "scripts", "tests"),
    *("pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"),
}
STAGES = ("data", "policy", "rollout", "scoring", "objective", "telemetry")
VAGUE_NAMES = {"base", "common", "helper", "helpers", "manager", "misc", "util", "utils"}
RUNS_CODE = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
MACHINE = re.compile(r"(?<![\w.}])/(?:home|root|tmp|work|mnt|Users)/|index[-]url|py[p]i\.org|python[h]osted")


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def text_files() -> list[Path]:
    files = (path for folder in (*PRODUCT, "scripts", "tests", ".ci") for path in (ROOT / folder).rglob("*"))
    code = [path for path in files if path.is_file() and "__pycache__" not in path.parts]
    return [*code, *(path for path in ROOT.iterdir() if path.name in TOP_LEVEL and path.is_file())]


@functools.cache  # several rules look at all of them
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported_names(path: Path) -> Iterator[tuple[str, str]]:
    """Every imported module, and each name that is taken from it (empty if the module itself is)."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_no_file_is_too_long() -> None:
    files = [*python_files(*PRODUCT, "tests", "scripts"), *(path for path in text_files() if "scripts" in path.parts)]
    lengths = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert {path: length for path, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_no_function_is_too_long() -> None:
    lengths = {
        f"{relative(path)}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in python_files(*PRODUCT, "tests", "scripts")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}


def test_no_module_has_a_name_that_says_nothing() -> None:
    modules = {relative(path): set(path.stem.split("_")) for path in python_files(*PRODUCT, "tests", "scripts")}
    assert {path for path, words in modules.items() if words & VAGUE_NAMES} == set()


def test_the_top_of_the_tree_holds_what_belongs_there() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0 or not listed.stdout:
        pytest.skip("not a git checkout")
    top = {path.partition("/")[0] for path in listed.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} - TOP_LEVEL == set()


def test_nothing_names_a_machine_or_a_package_index() -> None:
    found = [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in text_files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if MACHINE.search(line)
    ]
    assert found == []


def test_stages_see_their_section_and_never_the_whole_recipe() -> None:
    whole = {("grpo_cli.recipe.schema", "Recipe"), ("grpo_cli.recipe.load", "LoadedRecipe")}
    seen = [
        f"{relative(path)} imports {name}"
        for path in python_files(*(f"grpo_cli/{stage}" for stage in STAGES))
        for module, name in imported_names(path)
        if (module, name) in whole
    ]
    assert seen == []


def test_the_product_reads_no_format_that_runs_code() -> None:
    imports = [
        f"{relative(path)} imports {module}"
        for path in python_files(*PRODUCT)
        for module, _ in imported_names(path)
        if module.partition(".")[0] in RUNS_CODE
    ]
    calls = [
        f"{relative(path)}:{node.lineno} calls {name}"
        for path in python_files(*PRODUCT)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and (name := unsafe_call(node)) is not None
    ]
    assert [*imports, *calls] == []


def unsafe_call(call: ast.Call) -> str | None:
    """Name a call that may run code from data; a `torch.load` that reads weights only may not."""
    name = ast.unparse(call.func)
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if name == "torch.load":
        weights_only = keywords.get("weights_only")
        return None if isinstance(weights_only, ast.Constant) and weights_only.value is True else name
    if name in {"numpy.load", "np.load"}:
        return name if "allow_pickle" in keywords else None
    return name if name in {"eval", "exec", "os.system", "yaml.unsafe_load", "yaml.full_load"} else None


@pytest.mark.parametrize(
    ("source", "unsafe"),
    [
        ("torch.load(path)", True),
        ("torch.load(path, weights_only=False)", True),
        ("torch.load(path, weights_only=True)", False),
        ("np.load(path, allow_pickle=True)", True),
        ("np.load(path)", False),
        ("eval(text)", True),
        ("model.eval()", False),
    ],
)
def test_an_unsafe_call_is_told_from_a_safe_one(source: str, *, unsafe: bool) -> None:
    call = ast.parse(source, mode="eval").body
    assert isinstance(call, ast.Call)
    assert (unsafe_call(call) is not None) is unsafe
