"""Programs in completions, and tests in the columns of a dataset."""

import time
from typing import Any

import pytest

from rewards.programs.blocks import last_python_block
from rewards.programs.cases import AssertCase, CallCase, InputCase, cases_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Here:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```python\na\n```\n```py\nb\n```\n```\nc\n```", "b\n"),
        ("  ```Python title\n  a\n  ```", "  a\n"),
        ("~~~python\n```\na\n~~~", "```\na\n"),
        ("````python\n```\n````", "```\n"),
        ("```python\r\na\r\n```\r\n", "a\r\n"),
        ("```python\n```", ""),
        ("~~~\n```python\na\n```", "a\n"),
        ("```python\nunfinished", None),
        ("x = 1", None),
    ],
)
def test_the_last_complete_block_is_the_program(text: str, expected: str | None) -> None:
    assert last_python_block(text) == expected


@pytest.mark.parametrize("line", ["```python\n", "~~~\n```python\n", "```python x\n```py\n", "``` " * 10 + "\n"])
def test_a_text_full_of_openings_takes_no_time(line: str) -> None:
    started = time.process_time()
    assert last_python_block(line * 20_000) is None
    assert time.process_time() - started < 1


@pytest.mark.parametrize(
    ("tests", "expected"),
    [
        (["assert f() == 1"], [AssertCase(source="assert f() == 1")]),
        ('["assert f() == 1"]', [AssertCase(source="assert f() == 1")]),
        ("assert f() == 1\nassert g()", [AssertCase(source="assert f() == 1\nassert g()")]),
        ([{"input": "1", "output": "2"}], [InputCase(text="1", expected="2")]),
        ({"inputs": [["1", "2"]], "outputs": [["3"]]}, [InputCase(text="1\n2", expected="3")]),
        ({"fn_name": "f", "inputs": [[1]], "outputs": [2]}, [CallCase(name="f", arguments=[1], expected=2)]),
        ({"language": "Python", "test_cases": []}, None),
        ({"language": "python", "test_cases": '[{"input": "1", "output": "2"}]'}, [InputCase(text="1", expected="2")]),
        ({"inputs": '["1"]', "outputs": '["2"]'}, [InputCase(text="1", expected="2")]),
        ('"assert f()"', [AssertCase(source="assert f()")]),
        (r'"[\"assert f()\"]"', [AssertCase(source="assert f()")]),
        (" ", None),
        (["", " \n"], None),
        ("null", None),
        (None, None),
    ],
)
def test_forms_of_tests(tests: Any, expected: Any) -> None:
    assert cases_of(tests, None) == expected
    assert cases_of("ignored", tests) == (expected if tests is not None else [AssertCase(source="ignored")])


@pytest.mark.parametrize(
    "tests",
    [
        7,
        [7],
        {"inputs": ["1"], "outputs": []},
        [{"input": "1"}],
        {"x": 1},
        {"inputs": "12", "outputs": "12"},
        {"test_cases": "assert f()"},
        [{"fn_name": "f", "input": "x", "output": "1"}],
    ],
)
def test_other_forms_are_refused(tests: Any) -> None:
    with pytest.raises(ValueError, match=r"tests? (are|is|need)"):
        cases_of(tests, None)
