"""Programs against tests: what passes, what fails, and what cheats."""

import json
import os
import time
from typing import Any

import pytest

from rewards.code import PassedTests
from rewards.confinement import choice
from rewards.confinement.choice import Choice, choose
from rewards.confinement.layers import Layer
from rewards.confinement.limits import Limits
from rewards.confinement.sandbox import ConfinementError, Sandbox

pytestmark = pytest.mark.skipif(bool(choose(Limits()).open), reason="programs cannot be confined on this machine")

ADD = "def add(a, b):\n    return a + b"
ADD_TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]


@pytest.fixture(scope="module")
def reward() -> PassedTests:
    """Patient: tests may run on a machine with much else to do."""
    return PassedTests(timeout_seconds=20, max_seconds=60, concurrency=2)


@pytest.fixture(scope="module")
def hasty() -> PassedTests:
    return PassedTests(timeout_seconds=1, max_seconds=20)


def block(source: str) -> str:
    return f"Here it is:\n```python\n{source}\n```\nDone."


def share(reward: PassedTests, source: str, tests: Any) -> float | None:
    return reward(completions=[block(source)], tests=[tests])[0]


def failures(reward: PassedTests, source: str, tests: Any) -> str:
    logged: dict[str, Any] = {}
    reward(completions=[block(source)], tests=[tests], log_extra=lambda name, values: logged.update({name: values[0]}))
    reasons: str = logged["tests_failed"]
    return reasons


def test_each_passed_test_counts(reward: PassedTests) -> None:
    completions = [block(ADD), block("def add(a, b):\n    return 3"), block("def sub(a, b): ..."), "add = sum"]
    assert reward(completions=completions, tests=[ADD_TESTS] * 4) == [1.0, 0.5, 0.0, 0.0]
    messages = [[{"role": "assistant", "content": text}] for text in completions]
    assert reward(completions=messages, tests=[ADD_TESTS] * 4) == [1.0, 0.5, 0.0, 0.0]


def test_all_or_nothing() -> None:
    strict = PassedTests(all_or_nothing=True)
    completions = [block(ADD), block("def add(a, b):\n    return 3")]
    assert strict(completions=completions, tests=[ADD_TESTS] * 2) == [1.0, 0.0]


def test_rows_without_tests_for_python_do_not_apply(reward: PassedTests) -> None:
    rows: list[Any] = [None, [], {"language": "rust", "test_cases": [{"input": "", "output": ""}]}]
    assert reward(completions=[block(ADD)] * 3, verification_info=rows) == [None] * 3
    assert reward(completions=[block(ADD)] * 2, tests=[ADD_TESTS] * 2, verification_info=[None, rows[2]]) == [1.0, None]
    with pytest.raises(ValueError, match="needs a dataset column `tests` or `verification_info`"):
        reward(completions=[block(ADD)])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("print(int(input()) * 2)", 1.0),
        ("import sys\nfor line in sys.stdin:\n    print(int(line) * 2, '  ')\nprint()", 1.0),
        ("print(4)", 0.5),
        ("print(int(input()) * 2)\nraise SystemExit(1)", 0.0),
        ("n = int(input())\nprint(n * 2) if n == 2 else 1 / 0", 0.5),
        ("if __name__ == '__main__':\n    print(int(input()) * 2)", 1.0),
        (
            (
                "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 26)\n"
                "threading.Thread(target=lambda: print(int(input()) * 2)).start()"
            ),
            1.0,
        ),
    ],
)
def test_programs_that_read_and_write(reward: PassedTests, source: str, expected: float) -> None:
    tests = {"inputs": ["2\n", "3\n"], "outputs": ["4\n", "6"]}
    info = {
        "language": "python",
        "test_cases": [
            {"type": "stdin_stdout", "input": text, "output": out, "fn_name": None}
            for text, out in zip(tests["inputs"], tests["outputs"], strict=True)
        ],
    }
    assert share(reward, source, tests) == expected
    assert reward(completions=[block(source)], verification_info=[json.dumps(info)]) == [expected]


def test_a_right_answer_is_never_too_long(reward: PassedTests) -> None:
    tests = [{"input": "", "output": "x" * (3 << 19)}]
    assert share(reward, "print('x' * (3 << 19))", tests) == 1.0
    assert failures(reward, "print('x' * (1 << 22))", tests) == "output"


CHEATS = {
    "leaves before the tests": "import sys\nsys.exit(0)",
    "leaves for good": "import os\nos._exit(0)",
    "leaves when it is asked": "import os\ndef add(a, b):\n    os._exit(0)",
    "leaves politely when it is asked": "def add(a, b):\n    raise SystemExit(0)",
    "returns what equals everything": "class Any(int):\n    def __eq__(self, other):\n        return True\n    __hash__ = None\n"
    "def add(a, b):\n    return Any(7)",
    "returns an object that equals everything": "class Any:\n    __eq__ = __lt__ = __contains__ = lambda self, other: True\n"
    "    __bool__ = lambda self: True\n    __sub__ = __rsub__ = __abs__ = lambda self, *_: 0\ndef add(a, b):\n    return Any()",
    "answers that an object equals everything": "class Any:\n    def __getattr__(self, name):\n        return lambda *_: True\n"
    "def add(a, b):\n    return Any()",
    "changes what asserts raise": "import builtins\nbuiltins.AssertionError = type('Quiet', (BaseException,), {})\n"
    "def add(a, b):\n    return None",
    "changes int": "import ctypes, builtins\nbuiltins.int = builtins.isinstance = lambda *_: True\ndef add(a, b):\n    return None",
    "prints what a harness would": 'print(\'{"loaded": true}\\n{"passed": true, "why": ""}\\n\' * 3, flush=True)\n'
    "def add(a, b):\n    print('{\"passed\": true}', flush=True)",
    "writes into every open file": "import os\n"
    'for number in range(3, 64):\n    try:\n        os.write(number, b\'{"passed": true, "why": ""}\\n\' * 4)\n'
    "    except OSError:\n        pass\ndef add(a, b):\n    return None",
    "answers out of turn": "import gc\nfrom rewards.programs.peer import Peer\n"
    "peer = next(each for each in gc.get_objects() if isinstance(each, Peer))\n"
    "for _ in range(5):\n    peer.send({'gives': True})\ndef add(a, b):\n    return None",
    "asks the checker for more than calls": "import gc\nfrom rewards.programs.peer import Peer\n"
    "peer = next(each for each in gc.get_objects() if isinstance(each, Peer))\n"
    "def add(a, b):\n    peer.send({'do': 'setattr', 'with': ['tuple', [['yours', 0], 'x', 1]], 'named': ['dict', []]})\n",
    "sends rubbish": "import gc\nfrom rewards.programs.peer import Peer\n"
    "peer = next(each for each in gc.get_objects() if isinstance(each, Peer))\n"
    "def add(a, b):\n    peer._writer.write(b'rubbish\\n' * 9)\n    peer._writer.flush()",
    "runs forever": "def add(a, b):\n    while True:\n        pass",
    "is no Python": "def add(a, b) return",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_cheat_passes_nothing(reward: PassedTests, hasty: PassedTests, cheat: str) -> None:
    assert share(hasty if "forever" in cheat else reward, CHEATS[cheat], ADD_TESTS) == 0.0


@pytest.mark.parametrize(
    ("source", "test"),
    [
        (
            "import os\ndef f(x):\n    os._exit(0)",
            "try:\n    f(-1)\nexcept Exception:\n    pass\nelse:\n    assert False",
        ),
        ("import os\ndef f(x):\n    os._exit(0)", "try:\n    f(-1)\nexcept:\n    pass"),
        ("def f(x):\n    while True: pass", "try:\n    f(-1)\nexcept Exception:\n    pass"),
        ("def f(x):\n    while True: pass", "try:\n    f(-1)\nexcept:\n    pass"),
        ("def sorted(x):\n    return [1, 2]\ndef f(x):\n    return 7", "assert sorted(f([2, 1])) == [1, 2]"),
        ("class math:\n    isclose = lambda *_: True\ndef f(x):\n    return 7", "assert math.isclose(f(1), 3)"),
        ("def abs(x):\n    return 0\ndef f(x):\n    return 7", "assert abs(f(1) - 3) < 1e-6"),
        ("class A:\n    __contains__ = lambda *_: True\ndef f(x):\n    return A()", "assert 3 in f(1)"),
        ("def f(x):\n    raise StopIteration", "for v in map(f, [1, 2, 3]):\n    assert v == 3"),
        ("x = 1", "assert max([1, 5, 3]) == 5"),
        ("class V:\n    __sub__ = lambda *_: 0\ndef f(x):\n    return V()", "assert f(1) - f(2) == 0"),
        ("def max(x):\n    return x[0]", "assert max([1, 5, 3]) == 5"),
        ("abs = lambda x: 0\ndef f(x):\n    return 7", "from solution import f\nassert abs(f(1) - 3) < 1e-6"),
        ("abs = lambda x: 0\ndef f(x):\n    return 7", "from solution import *\nassert abs(f(1) - 3) < 1e-6"),
    ],
)
def test_tests_that_catch_or_use_builtins_are_not_fooled(
    reward: PassedTests, hasty: PassedTests, source: str, test: str
) -> None:
    assert share(hasty if "while" in source else reward, source, [test]) == 0.0


@pytest.mark.parametrize(
    ("source", "test"),
    [
        ("def f(x):\n    return (x, {x: [x]}, {x}, 1.5, b'b', 2 + 1j, None, True, 10**50)",
         "assert f(1) == (1, {1: [1]}, {1}, 1.5, b'b', 2 + 1j, None, True, 10**50)"),
        ("from collections import Counter, OrderedDict\ndef f(x):\n    return Counter(x)", "assert f('aab') == {'a': 2, 'b': 1}"),
        ("def f(x):\n    x.sort()", "x = [3, 1]\nf(x)\nassert x == [1, 3]"),
        ("def f(m):\n    m[0][0] = 7", "m = [[1]]\nf(m)\nassert m == [[7]]"),
        ("def f(x):\n    raise ValueError('no')", "try:\n    f(1)\nexcept ValueError as error:\n    assert str(error) == 'no'"),
        ("def f(x):\n    yield from range(x)", "assert list(f(3)) == [0, 1, 2]\nassert next(f(1)) == 0"),
        ("def f(g, x):\n    return [g(each) for each in x]", "assert f(lambda x: x + 1, [1, 2]) == [2, 3]"),
        (("class Stack:\n    def __init__(self):\n        self.items = []\n    def push(self, x):\n        self.items.append(x)\n"
         "    def __len__(self):\n        return len(self.items)"),
         "s = Stack()\ns.push(1)\ns.push(x=2)\nassert len(s) == 2\nassert s.items == [1, 2]\nassert isinstance(s, Stack)"),
        ("class P:\n    def __init__(self, x):\n        self.x = x\n    def __eq__(self, other):\n        return self.x == other.x",
         "assert P(1) == P(1)\nassert P(1) != P(2)"),
        ("import math\ndef f(x):\n    return math.sqrt(x)", "assert math.isclose(f(2) ** 2, 2)"),
        ("import numpy as np\ndef f(x):\n    return np.array(x) * 2", "import numpy as np\nassert (f([1, 2]) == np.array([2, 4])).all()"),
        ("def f(x):\n    return x", "from solution import f\ndef test_f():\n    assert f(1) == 1"),
        ("def f(x):\n    return x", "def check(candidate):\n    assert candidate(1) == 1\ncheck(f)"),
        ("def f(nums, target, operation):\n    return nums + [target, operation]",
         "assert f(nums=[2], target=9, operation='x') == [2, 9, 'x']"),
        (("sieve = [True] * 10**7\nknot = {}\nknot['self'] = knot\ndeep = ()\nfor _ in range(2000):\n    deep = (deep,)\n"
         "def f(x):\n    return x"), "assert f(1) == 1"),
        ("deep = ()\nfor _ in range(2000):\n    deep = (deep,)\ndef f(x):\n    return x", "assert f(deep) is not None"),
        ("calls = []\ndef f(x):\n    calls.append(x)", "f(1)\nf(2)\nassert calls == [1, 2]"),
        ("import sys\ndef f(x):\n    return x\nsys.exit(0)", "assert f(1) == 1"),
        ("def max(x):\n    return sorted(x)[-1]", "assert max([1, 5, 3]) == 5"),
        ("def tokenize(x):\n    return x.split()\nclass queue:\n    size = 7", "assert tokenize('a b') == ['a', 'b']\nassert queue().size == 7"),
        (("class E(ValueError):\n    def __init__(self, code):\n        self.code = code\n    def __str__(self):\n        return 'no'\n"
         "class F(E): pass\ndef f(x):\n    raise F(7)"),
         ("try:\n    f(1)\nexcept E as error:\n    assert (error.code, str(error)) == (7, 'no')\nelse:\n    assert False\n"
         "try:\n    f(1)\nexcept ValueError:\n    pass")),
        ("def f(x):\n    return {}[x]", "try:\n    f(1)\nexcept KeyError as error:\n    assert error.args == (1,)"),
        ("import json\ndef f(x):\n    return json.loads(x)", "import json\ntry:\n    f('x')\nexcept json.JSONDecodeError:\n    pass"),
        ("def f(xs):\n    return sum(xs)", "assert f(range(5)) == f(iter([4, 6])) == f({10: 1}.keys()) == f(x for x in [9, 1]) == 10"),
        ("def f(n):\n    return range(n)", "assert f(3) == range(3)"),
        (("class V:\n    def __init__(self, x):\n        self.x = x\n    def __add__(self, other):\n        return V(self.x + other.x)\n"
          "    def __eq__(self, other):\n        return self.x == other.x"), "assert V(1) + V(2) == V(3)\nassert V(1) + V(2) != V(4)"),
        ("def f(t):\n    return t.val + t[0] + len(t) + sum(t) + t.more(1)",
         ("class T:\n    val = 1\n    def __getitem__(self, i):\n        return 2\n    def __len__(self):\n        return 3\n"
         "    def __iter__(self):\n        return iter([4])\n    def more(self, x):\n        return x + 4\nassert f(T()) == 15")),
    ],
)  # fmt: skip
def test_honest_programs_pass(reward: PassedTests, source: str, test: str) -> None:
    assert failures(reward, source, [test]) == ""
    assert share(reward, source, [test]) == 1.0


WRONG = "def add(a, b):\n    return 'nonsense'"
CASE = "import unittest\nclass AddCase(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(add(1, 2), 3)\n"
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3"


@pytest.mark.parametrize(
    "tests",
    [
        json.dumps(ADD_TESTS[0]),
        json.dumps(json.dumps(ADD_TESTS)),
        [
            CASE,
            f"{CASE}if __name__ == '__main__':\n    unittest.main()",
            f"{CASE}unittest.main()",
            "class TestAdd:\n    def test_a(self):\n        assert add(1, 2) == 3",
            "async def test_a():\n    assert add(1, 2) == 3",
            f"{CHECK}\ncheck(add)",
        ],
    ],
)
def test_tests_that_nothing_calls_are_run_all_the_same(reward: PassedTests, tests: Any) -> None:
    assert reward(completions=[block(ADD), block(WRONG)], tests=[tests] * 2) == [1.0, 0.0]


def test_a_test_that_uses_nothing_of_the_program_fails(reward: PassedTests) -> None:
    tests = ["# assert add(1, 2) == 3", "assert 1 + 2 == 3", "assert max([1, 5, 3]) == 5", "def test_a(): pass"]
    assert failures(reward, WRONG, tests) == "error: the test uses nothing of the program"
    assert share(reward, WRONG, tests) == 0.0


def test_a_program_cannot_skip_a_case(reward: PassedTests) -> None:
    assert share(reward, "import unittest\ndef add(a, b):\n    raise unittest.SkipTest('no')", [CASE]) == 0.0


def test_what_tests_need_stands_before_each_of_them(reward: PassedTests, hasty: PassedTests) -> None:
    tests = [
        "import math",
        "half = lambda x: x / 2",
        "assert f(1) == 1",
        "assert half(f(4)) == 2",
        "assert math.sqrt(f(4)) == 2",
    ]
    assert share(reward, "def f(x):\n    return x", tests) == 1.0
    assert share(hasty, "def f(x):\n    while x == 1: pass\n    return x", tests) == 2 / 3
    assert share(reward, "def f(x):\n    return x", tests[:2]) == 0.0


def test_check_is_called_with_the_entry_point(reward: PassedTests) -> None:
    completions = [block(ADD), block(WRONG)]
    assert reward(completions=completions, tests=[CHECK] * 2, entry_point=["add"] * 2) == [1.0, 0.0]
    with pytest.raises(ValueError, match=r"row 1: a test is called with .* needs a column `entry_point`"):
        reward(completions=completions, tests=[ADD_TESTS, CHECK])


def test_a_test_function_that_fails_fails(reward: PassedTests) -> None:
    assert share(reward, "def f(x):\n    return x", ["def test_f():\n    assert f(1) == 2"]) == 0.0


def test_functions_are_called_as_apps_calls_them(reward: PassedTests) -> None:
    tests = {"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [[1, 2]]]}
    assert share(reward, ADD, tests) == 1.0
    assert share(reward, "class Solution:\n    def add(self, a, b):\n        return a + b", tests) == 1.0
    assert share(reward, "def add(a, b):\n    return (1, 2)", tests) == 0.5
    assert share(reward, "def other(): ...", tests) == 0.0
    assert share(reward, "def max(a, b):\n    return a + b", {**tests, "fn_name": "max"}) == 1.0
    assert (
        share(
            reward,
            "import numpy as np\ndef add(a, b):\n    return np.array([a, b])",
            {**tests, "outputs": [[1, 2], [[1], [2]]]},
        )
        == 1.0
    )
    lines = [{"fn_name": "add", "input": '"a"\n"b"', "output": '"ab"'}]
    assert share(reward, ADD, lines) == 1.0


def test_a_test_that_does_not_come_back_costs_only_itself(hasty: PassedTests) -> None:
    source = "import os\ndef f(x):\n    while x == 1: pass\n    if x == 3: os._exit(0)\n    return x"
    tests = [f"assert f({x}) == {x}" for x in range(5)]
    assert share(hasty, source, tests) == 3 / 5
    assert failures(hasty, source, tests) == "timeout; error: the program ended"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("def add(a, b):\n    return 4", "wrong"),
        ("def add(a, b):\n    return bytearray(1 << 40)", "memory"),
        ("x = bytearray(1 << 40)", "memory"),
        ("def add(a, b):\n    return 1 / 0", "error: ZeroDivisionError: division by zero"),
        ("while True: pass", "timeout"),
        ("add = ", "error: SyntaxError: invalid syntax (solution.py, line 1)"),
    ],
)
def test_why_tests_failed_is_logged(reward: PassedTests, hasty: PassedTests, source: str, why: str) -> None:
    assert failures(hasty if why == "timeout" else reward, source, ADD_TESTS) == why


@pytest.mark.parametrize(
    "name", ["raise ValueError('}' * (1 << 21))", "def add(a, b): raise ValueError('\\ud800\\x1b' * 999)"]
)
def test_no_reason_is_too_long_or_cannot_be_written(reward: PassedTests, name: str) -> None:
    why = failures(reward, name, ADD_TESTS)
    assert why.startswith("error: ValueError: ")
    assert len(why) <= 200
    assert why.isprintable()


def test_tests_that_are_left_when_the_time_is_up_have_failed() -> None:
    hurried = PassedTests(timeout_seconds=1, max_seconds=1.5)
    assert failures(hurried, "def f(x):\n    while True: pass", ["assert f(1)"] * 9) == "timeout; not run"


def test_a_call_ends_in_time_whatever_the_programs_do() -> None:
    hurried = PassedTests(timeout_seconds=1, max_call_seconds=1.5, concurrency=1)
    logged: dict[str, Any] = {}
    started = time.monotonic()
    completions = [block("def add(a, b):\n    while True: pass")] * 9
    assert hurried(completions=completions, tests=[ADD_TESTS[:1]] * 9, log_extra=logged.__setitem__) == [0.0] * 9
    assert time.monotonic() - started < 4
    assert logged["tests_failed"][::8] == ["timeout", "time"]


def test_programs_at_the_same_time_fit_into_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    for memory, expected in {1024: 6, 4096: 1, 16384: 1, 64: 64}.items():
        assert PassedTests(max_memory_mib=memory, allow_unconfined=True)._concurrency == expected


def test_a_number_of_many_digits_takes_no_time(hasty: PassedTests) -> None:
    started = time.monotonic()
    source = "from decimal import Decimal\ndef f(x):\n    return Decimal(f'1E+{x}')"
    assert share(hasty, source, ["assert int(f(99999999)) == 3", "assert f(3) == 1000"]) == 0.5
    assert time.monotonic() - started < 4


def test_what_is_logged(reward: PassedTests) -> None:
    columns: dict[str, Any] = {}
    metrics: dict[str, float] = {}
    reward(
        completions=[block(ADD), block("def add(a, b):\n    return 3"), "none", "other"],
        tests=[ADD_TESTS, ADD_TESTS, ADD_TESTS, None],
        log_extra=columns.__setitem__,
        log_metric=metrics.__setitem__,
    )
    assert columns == {"tests_passed": ["2/2", "1/2", "0/2", None], "tests_failed": ["", "wrong", "no program", None]}
    shares = {"passed": 1 / 2, "all_passed": 1 / 3, "no_program": 1 / 3, "timeout": 0.0, "memory": 0.0, "error": 0.0}
    assert metrics == pytest.approx({f"code/{name}": value for name, value in shares.items()})


def test_the_whole_text_can_be_the_program() -> None:
    assert PassedTests(without_block="text")(completions=[ADD, block(ADD)], tests=[ADD_TESTS] * 2) == [1.0, 1.0]


def test_bad_parameters_are_named() -> None:
    with pytest.raises(ValueError, match="timeout_seconds is 0; allowed is a number above 0"):
        PassedTests(timeout_seconds=0)
    with pytest.raises(ValueError, match="without_block is 'all'; allowed is 'fail' or 'text'"):
        PassedTests(without_block="all")  # type: ignore[arg-type]


def test_nothing_runs_unconfined_unless_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    open_choice = Choice(
        sandbox=Sandbox(layer=Layer.LIMITS, limits=Limits()), open=("network", "files"), refused=("a: b",)
    )
    monkeypatch.setattr(choice, "_choose", lambda _: open_choice)
    with pytest.raises(
        ConfinementError, match=r"UNCONFINED, network and files open to it \(a: b\).*allow_unconfined: true"
    ):
        PassedTests()
    unconfined = PassedTests(allow_unconfined=True)
    assert unconfined.describe() == "programs run UNCONFINED, network and files open to it (a: b)"
    assert unconfined(completions=[block(ADD)], tests=[ADD_TESTS]) == [1.0]


def test_what_is_in_force_is_said(reward: PassedTests) -> None:
    assert reward.describe().startswith("programs run confined by ")
    assert PassedTests.isolated
