"""The tests of a row, in the forms that datasets have them."""

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
    """Statements that must not raise, such as `assert add(1, 2) == 3`."""

    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CallCase:
    """A function called with arguments must return `expected`."""

    name: str
    arguments: Sequence[Any]
    expected: Any


Case = InputCase | AssertCase | CallCase


def cases_of(tests: Any, verification_info: Any) -> list[Case] | None:
    """Read the tests of one row.

    Args:
        tests: A list of statements, of `{"input": ..., "output": ...}`; a mapping with lists `inputs` and `outputs` (APPS, TACO)
            and perhaps `fn_name`; statements as one text; or JSON of one of these.
        verification_info: `{"language": "python", "test_cases": [...]}`, or JSON of it; preferred if it is there.

    Returns:
        The tests; None if there are none, or they are for another language.

    Raises:
        ValueError: If they have another form.
    """
    content = _decoded(tests if verification_info is None else verification_info)
    if content is None:
        return None
    if isinstance(content, str):
        return [AssertCase(source=content)]
    if isinstance(content, Mapping):
        language = content.get("language")
        if language is not None and str(language).lower() not in _PYTHON:
            return None
        content = content["test_cases"] if "test_cases" in content else _in_pairs(content)
    if not isinstance(content, Sequence):
        raise ValueError(f"tests are a list, a mapping or a text, not {_shown(content)}")  # noqa: TRY004  a dataset's, not a caller's
    return [_case(each) for each in content] or None


def _decoded(content: Any) -> Any:
    if not isinstance(content, str):
        return content
    try:
        decoded = json.loads(content)
    except ValueError:
        return content
    return decoded if isinstance(decoded, list | dict) else content


def _in_pairs(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Put inputs and outputs together.

    Raises:
        ValueError: If they are not there, or not as many.
    """
    inputs, outputs = content.get("inputs"), content.get("outputs")
    if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or len(inputs) != len(outputs):
        raise ValueError(f"tests need `test_cases`, or `inputs` and `outputs` of the same length: {_shown(content)}")
    name = content.get("fn_name")
    return [{"input": text, "output": out, "fn_name": name} for text, out in zip(inputs, outputs, strict=True)]


def _case(content: Any) -> Case:
    if isinstance(content, str):
        return AssertCase(source=content)
    if not isinstance(content, Mapping) or content.get("input") is None or content.get("output") is None:
        raise ValueError(f"a test is a text, or a mapping with `input` and `output`, not {_shown(content)}")
    if content.get("fn_name"):
        return _call_case(content["fn_name"], content["input"], content["output"])
    return InputCase(text=_lines(content["input"]), expected=_lines(content["output"]))


def _call_case(name: str, arguments: Any, expected: Any) -> CallCase:
    """Read the call of a function. A text holds one argument a line, each as JSON, and the output is JSON then, too."""
    if isinstance(arguments, str):
        arguments = [json.loads(line) for line in arguments.splitlines() if line.strip()]
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
