"""The tests of a row, in the forms that datasets have them."""

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_PYTHON = frozenset({"python", "python3", "py"})


@dataclass(frozen=True, kw_only=True, slots=True)
class InputCase:
    """A program reads `text` and must write `expected`."""

    text: str
    expected: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AssertCase:
    """Statements that use the program and must not raise, such as `assert add(1, 2) == 3`.

    Attributes:
        source: The statements.
        entry_point: Name of the function that a function `check` of theirs is called with.
    """

    source: str
    entry_point: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CallCase:
    """A function called with arguments must return `expected`."""

    name: str
    arguments: Sequence[Any]
    expected: Any


Case = InputCase | AssertCase | CallCase


def cases_of(tests: Any, verification_info: Any, entry_point: str | None = None) -> list[Case] | None:
    """Read the tests of one row.

    Args:
        tests: A list of statements, of `{"input": ..., "output": ...}`; a mapping with lists `inputs` and `outputs` (APPS, TACO)
            and perhaps `fn_name`; statements as one text; or JSON of one of these.
        verification_info: `{"language": "python", "test_cases": [...]}`, or JSON of it; preferred if it is there.
        entry_point: The function that is tested, for tests that define `check(candidate)` (HumanEval).

    Returns:
        The tests; None if there are none, or they are for another language.

    Raises:
        ValueError: If they have another form.
    """
    content = _decoded(tests if verification_info is None else verification_info)
    if content is None or _is_blank(content):
        return None
    if isinstance(content, str):
        return [_assert_case(content, entry_point)]
    if isinstance(content, Mapping):
        language = content.get("language")
        if language is not None and str(language).lower() not in _PYTHON:
            return None
        content = _decoded(content["test_cases"]) if "test_cases" in content else _in_pairs(content)
    if isinstance(content, str) or not isinstance(content, Sequence):
        raise ValueError(f"tests are a list, a mapping or a text, not {_shown(content)}")  # noqa: TRY004  a dataset's, not a caller's
    return [_case(each, entry_point) for each in _with_what_they_need(content)] or None


def _with_what_they_need(tests: Sequence[Any]) -> list[Any]:
    """Put imports and definitions, which test nothing, before each of the tests that come after them."""
    found: list[Any] = []
    needed: list[str] = []
    for each in tests:
        if _is_blank(each):
            continue
        if isinstance(each, str) and _tests_nothing(each):
            needed.append(each)
        else:
            found.append("\n".join([*needed, each]) if isinstance(each, str) else each)
    return found or ["\n".join(needed)] * bool(needed)


def _tests_nothing(source: str) -> bool:
    return (tree := _parsed(source)) is not None and not any(map(_may_test, tree.body))


def _may_test(node: ast.stmt) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name.startswith("test") or node.name == "check"
    if isinstance(node, ast.ClassDef):
        return node.name.startswith("Test") or any("TestCase" in ast.unparse(base) for base in node.bases)
    return not isinstance(node, ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign)


def _parsed(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # which running it will tell
        return None


def _is_blank(content: Any) -> bool:
    return isinstance(content, str) and not content.strip()


def _decoded(content: Any) -> Any:
    """Read JSON, and JSON of JSON; what is none is a text."""
    while isinstance(content, str):
        try:
            decoded = json.loads(content)
        except (ValueError, RecursionError):
            return content
        if not isinstance(decoded, list | dict | str | None):
            return content
        content = decoded
    return content


def _in_pairs(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Put inputs and outputs together.

    Raises:
        ValueError: If they are not there, or not as many.
    """
    inputs, outputs = (_decoded(content.get(name)) for name in ("inputs", "outputs"))
    are_lists = all(isinstance(each, Sequence) and not isinstance(each, str) for each in (inputs, outputs))
    if not are_lists or len(inputs) != len(outputs):
        raise ValueError(f"tests need `test_cases`, or `inputs` and `outputs` of the same length: {_shown(content)}")
    name = content.get("fn_name")
    return [{"input": text, "output": out, "fn_name": name} for text, out in zip(inputs, outputs, strict=True)]


def _case(content: Any, entry_point: str | None) -> Case:
    if isinstance(content, str):
        return _assert_case(content, entry_point)
    if not isinstance(content, Mapping) or content.get("input") is None or content.get("output") is None:
        raise ValueError(f"a test is a text, or a mapping with `input` and `output`, not {_shown(content)}")
    if content.get("fn_name"):
        return _call_case(content["fn_name"], content["input"], content["output"])
    return InputCase(text=_lines(content["input"]), expected=_lines(content["output"]))


def _assert_case(source: str, entry_point: str | None) -> AssertCase:
    """Take statements; a function `check(candidate)` that they leave uncalled needs to know what it checks.

    Raises:
        ValueError: If it does not.
    """
    if (tree := _parsed(source)) is None:
        return AssertCase(source=source)
    is_defined = any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body)
    is_used = any(isinstance(node, ast.Name) and node.id == "check" for node in ast.walk(tree))
    if not is_defined or is_used:
        return AssertCase(source=source)
    if not entry_point:
        raise ValueError(
            f"a test is called with the function that it checks, so it needs a column `entry_point` with the name: {_shown(source)}"
        )
    return AssertCase(source=source, entry_point=entry_point)


def _call_case(name: str, arguments: Any, expected: Any) -> CallCase:
    """Read the call of a function. A text holds one argument a line, each as JSON, and the output is JSON then, too."""
    if isinstance(arguments, str):
        try:
            arguments = [json.loads(line) for line in arguments.splitlines() if line.strip()]
        except ValueError as error:
            raise ValueError(
                f"a test is a call of {name} with one argument a line as JSON, not {_shown(arguments)}"
            ) from error
        expected = _decoded_value(expected)
    if not isinstance(arguments, Sequence):
        raise ValueError(f"the input of a function is a list of arguments, not {_shown(arguments)}")  # noqa: TRY004
    return CallCase(name=name, arguments=list(arguments), expected=expected)


def _decoded_value(content: Any) -> Any:
    try:
        return json.loads(content) if isinstance(content, str) else content
    except ValueError:
        return content


def _lines(content: Any) -> str:
    return "\n".join(map(str, content)) if isinstance(content, list | tuple) else str(content)


def _shown(content: Any) -> str:
    text = repr(content)
    return text if len(text) <= 80 else text[:77] + "..."
