# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 - a program is one line
from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.sandbox.conftest import needs_bubblewrap
from tests.plugins.scores.mutants import HUMAN_EVAL, PAGE, of_human_eval, page
from tests.raising import raises
from whet.errors import ConfigError, DataError, SandboxError
from whet.plugins.sandbox.local import LANGUAGES
from whet.plugins.scores.code import PEER, compute_score, extract_code, read_tests, same_output
from whet.programs.inside.whet_peer import NO_PYTEST, frame
from whet.registry import REWARDS


def score(code: str, truth: Any, extra: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    return compute_score(f"Here it is:\n```python\n{code}\n```\nDone.", truth, extra, sandbox="unisolated", **options)


SQUARE = "def f(x):\n    return x * x"
DOUBLE = "print(2 * int(input()))"


@pytest.mark.parametrize(
    ("right", "wrong", "truth", "extra"),
    [
        (DOUBLE, "print(7)", {"inputs": ["1\n", "4\n"], "outputs": ["2\n", "8"]}, {}),
        (DOUBLE, "print(7)", '{"inputs": ["1", "4"], "outputs": ["2", "8"]}', {}),
        (DOUBLE, "print(7)", [{"input": "3", "output": "6", "testtype": "stdin"}], {}),
        (SQUARE, "def f(x): return x", {"inputs": [[2], [3]], "outputs": [4, 9], "fn_name": "f"}, {}),
        (SQUARE, "def g(x): return x * x", {"inputs": ["2", "3"], "outputs": ["4", "9"], "fn_name": "f"}, {}),
        (SQUARE, "def f(x): return [x]", [{"input": "3", "output": "9", "testtype": "functional"}], {"fn_name": "f"}),
        (
            "class Solution:\n    def pair(self, a, b):\n        return a, b",
            "class Solution:\n    def pair(self, a, b):\n        return b, a",
            {"inputs": ['[1]\n"x"'], "outputs": ['[[1], "x"]'], "fn_name": "Solution.pair"},
            {},
        ),
        (SQUARE, "def f(x): return 4", ["assert f(2) == 4", "assert f(3) == 9"], {}),
        (SQUARE, "def f(x): return 4", "assert f(2) == 4\nassert f(3) == 9", {}),
        (SQUARE, "def f(x): return 4", {"assert_case": ["assert f(-3) == 9"]}, {}),
        (SQUARE, "def f(x): return 4", {"test_list": ["assert math.sqrt(f(3)) == 3"], "test_setup_code": "import math"}, {}),
        (SQUARE, "def f(x): return 4", {"test": "def check(candidate):\n    assert candidate(3) == 9", "entry_point": "f"}, {}),
        (SQUARE, "def f(x): return 4", "def check(candidate):\n    assert candidate(3) == 9", {"entry_point": "f"}),
    ],
)  # fmt: skip
def test_kinds_of_tests(right: str, wrong: str, truth: Any, extra: dict[str, Any]) -> None:
    assert score(right, truth, extra) | {"pred": None} == {
        "reward": 1.0, "accuracy": 1.0, "passed": 1.0, "tests": len(read_tests(truth, extra).cases), "pred": None
    }  # fmt: skip
    assert score(wrong, truth, extra)["reward"] == 0.0


NULLS = (None, float("nan"), "", " ", "null", "None", "NaN", "<NA>", [])
CALLED = {"inputs": [[3]], "outputs": [9], "fn_name": "f"}


@pytest.mark.parametrize(
    "key", ["test", "test_code", "pytest", "assert_case", "test_list", "prompt", "fn_name", "testtype"]
)
@pytest.mark.parametrize("null", NULLS, ids=repr)
def test_a_null_key_is_a_key_that_is_not_there(key: str, null: Any) -> None:
    tests = read_tests(
        {"inputs": ["3"], "outputs": ["6"], "test_imports": null, "entry_point": null, key: null}, {key: null}
    )
    assert (tests.kind, tests.cases) == ("stdin", [("3", "6")])
    tests = read_tests(json.dumps({"test_list": ["assert f(3) == 9", None], "inputs": null, "outputs": null}), {})
    assert (tests.kind, tests.cases) == ("code", ["assert f(3) == 9"])
    if key not in CALLED:
        tests = read_tests({**CALLED, key: null}, {"entry_point": "f", key: null})
        assert (tests.kind, tests.entry, tests.cases) == ("call", "f", [{"args": [3], "expected": 9}])


def test_columns_that_are_not_used_pay_no_program() -> None:
    truth = {
        "inputs": ["3"],
        "outputs": ["6"],
        **dict.fromkeys(("test", "test_code", "pytest", "assert_case", "test_list")),
    }
    assert [score(code, truth)["reward"] for code in (DOUBLE, "print(7)")] == [1.0, 0.0]
    assert [score(code, json.dumps(truth))["reward"] for code in (DOUBLE, "print(7)")] == [1.0, 0.0]
    called = {**CALLED, "test": None, "test_list": [None]}
    assert [score(code, called)["reward"] for code in (SQUARE, "def f(x): return 7")] == [1.0, 0.0]


CHECK = "def check(candidate):\n    assert candidate(3) == 9\n"


@pytest.mark.parametrize(
    "truth",
    [
        *({key: null} for key in ("test", "test_code", "pytest", "assert_case", "test_list") for null in (*NULLS, [None])),
        {"test": ""},
        {"test": "pass"},
        {"test": "print('all tests passed')"},
        {"test": "# assert f(3) == 9"},
        {"test": '"""assert f(3) == 9"""'},
        {"test": "assert True, 'the code is right'"},
        {"test": "assert (f(3) == 9, 'the code is right')"},
        {"test": {"inputs": ["3"], "outputs": ["6"]}},
        {"test": CHECK},  # which nobody calls
        {"test": CHECK, "entry_point": None},
        {"test": "def test():\n    assert f(3) == 9\n"},
        {"test": "if __name__ == '__main__':\n    assert f(3) == 9"},
        {"test_list": ["x = 3", None]},
        {"pytest": "from solution import f\ndef test_f():\n    f(3)"},
        [None, None],
        ["", " "],
        "# assert nothing",
        '"print(1)"',
        {"inputs": ["3"], "outputs": None},
        {"inputs": ["3"], "outputs": [None]},
        [{"input": "3", "output": None}],
    ],
    ids=repr,
)  # fmt: skip
def test_a_suite_that_asserts_nothing_is_no_suite(truth: Any) -> None:
    with raises(DataError, re.compile(r"ground_truth$|^tests$|^outputs\[0\]$")):
        read_tests(truth, {})


@pytest.mark.parametrize(
    "test",
    [
        f"{CHECK}check(f)",
        "import sys\nif f(3) != 9:\n    sys.exit(1)",
        "if f(3) != 9:\n    raise ValueError",
        "from numpy.testing import assert_allclose\nassert_allclose(f(3), 9)",
        "import doctest\ndoctest.testmod()",
        "def same(x):\n    assert f(x) == x * x\nfor x in range(3):\n    same(x)",
        "import unittest\nclass Square(unittest.TestCase):\n    def test_f(self): self.assertEqual(f(3), 9)",
        "import pytest\ndef test_f():\n    with pytest.raises(TypeError):\n        f('a')",
        "print 3",  # of Python 2, which no program passes
    ],
)
def test_tests_that_can_fail_are_a_suite(test: str) -> None:
    assert read_tests({"test": test}, {}).cases == [test]


def test_pytest_files() -> None:
    tests = "import pytest\nfrom solution import f, Bad\n\n@pytest.mark.parametrize('x', [1, 2])\ndef test_f(x):\n"
    tests += "    assert f(x) == x * x\n\ndef test_bad():\n    with pytest.raises(Bad):\n        f('a')\n"
    right = "class Bad(ValueError): pass\ndef f(x):\n    if isinstance(x, str): raise Bad(x)\n    return x * x"
    # The interpreter of this environment has pytest.
    assert score(right, {"pytest": tests}, python=sys.executable)["reward"] == 1.0
    assert score(right.replace("raise Bad", "raise TypeError"), tests, python=sys.executable)["reward"] == 0.0
    assert score(right.replace("x * x", "x + x"), tests, python=sys.executable)["reward"] == 0.0


PYTEST_FILE = """
import contextlib, io, unittest
import pytest
import solution
from solution import *
from solution import sum as added

@pytest.fixture
def items():
    yield [3, 1]

@pytest.fixture(params=[0, 1])
def factor(request): return request.param

@pytest.fixture(autouse=True)
def before(): seen.append(1)

seen = []

class TestSquare:
    @pytest.mark.parametrize(("x", "y"), [(1, 1), (3, 9)])
    def test_f(self, x, y, factor): assert seen and f(x * factor) == y * factor

class Case(unittest.TestCase):
    def setUp(self): self.x = 2
    def test_f(self): self.assertEqual(f(self.x), 4)

def test_fixture(items):
    fill(items)
    assert items == [3, 1, 7] and sum(items) == 11 and added(1, 2) == 3

def test_printed(capsys, tmp_path):
    say("hello")
    assert capsys.readouterr().out == "hello\\n"
    with contextlib.redirect_stdout(io.StringIO()) as text:
        solution.say("you")
    assert text.getvalue() == "you\\n"
    (tmp_path / "a").write_text("5")

@pytest.mark.skip
def test_skipped(): assert False
"""


@pytest.mark.slow
def test_what_a_pytest_file_may_use() -> None:
    right = "def f(x): return x * x\ndef fill(a): a.append(7)\ndef say(x): print(x)\ndef sum(a, b): return a + b"
    assert score(right, {"pytest": PYTEST_FILE}, python=sys.executable)["reward"] == 1.0
    for one, other in [("x * x", "x + x"), ("append(7)", "append(8)"), ("print(x)", "print(x, x)"), ("a + b", "a - b")]:
        assert score(right.replace(one, other), {"pytest": PYTEST_FILE}, python=sys.executable)["reward"] == 0.0
    # No test that runs is no test that passes; nor is a file that cannot be read.
    for tests in (
        "import pytest\n@pytest.mark.skip\ndef test_a(): assert f(1) == 1",
        "import nothing\ndef test_a(): assert f(1) == 1",
        "assert f",
    ):
        assert score(right, {"pytest": tests}, python=sys.executable)["reward"] == 0.0


def test_a_missing_pytest_is_an_error_and_no_wrong_answer() -> None:
    # The interpreter of the sandbox sees no packages, unless one is named.
    with raises(SandboxError, "sandbox unisolated", found=NO_PYTEST, change=re.compile("reward.kwargs.python")):
        score("def f(x):\n    return x", {"pytest": "from solution import f\n\ndef test_f():\n    assert f(1) == 1\n"})
    # Code that says so is wrong.
    said = 'def f(x):\n    raise RuntimeError("pytest is not installed in the sandbox\'s interpreter")'
    tests = {"pytest": "from solution import f\n\ndef test_f():\n    assert f(1) == 1\n"}
    assert score(said, tests, python=sys.executable)["reward"] == 0.0


@pytest.mark.parametrize(
    "line",
    [
        "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding='utf-8')",
        "import io, sys\nsys.stdout = io.StringIO()",
        "import sys\nsys.stdout.close()",
    ],
)
def test_code_may_replace_its_standard_output(line: str) -> None:
    assert score(f"{line}\n{SQUARE}", ["assert f(2) == 4", "assert f(3) == 9"])["reward"] == 1.0


def test_statements_of_a_text_and_prose_before_a_function() -> None:
    truth = {"assert_case": "assert f(math.ceil(1.5)) == 4", "test_imports": "import math"}
    assert score(SQUARE, truth)["reward"] == 1.0
    truth = {"test": "def check(c):\n    assert c(2) == 4", "entry_point": "f"}
    prompt = {"prompt": "Complete this function.\n\ndef f(x):\n    pass\n"}
    assert score(SQUARE, truth, prompt)["reward"] == 1.0


def test_tests_of_a_function_are_for_python() -> None:
    fenced = "```javascript\nfunction f(x) { return x * x }\n```"
    assert compute_score(fenced, ["assert f(2) == 4"], sandbox="unisolated")["reward"] == 0.0
    with raises(DataError, "language", found=re.compile(r"'javascript'.*\(code\)")):
        compute_score(fenced, ["assert f(2) == 4"], sandbox="unisolated", language="javascript")


@pytest.mark.parametrize(("mode", "reward"), [("binary", 0.0), ("fraction", 0.75), ("fraction4", 0.31640625)])
def test_the_share_of_tests(mode: Any, reward: float) -> None:
    cases = [f"assert f({x}) == {x * x}" for x in (0, 1, 2)] + ["assert f('a') == 'aa'"]
    found = score(SQUARE, cases, score=mode)
    assert (found["reward"], found["accuracy"], found["passed"], found["tests"]) == (reward, 0.0, 0.75, 4)
    assert score(SQUARE, cases, score=mode, most_tests=3)["reward"] == 1.0


def test_a_test_that_takes_too_long_fails_alone() -> None:
    code = "def f(x):\n    while x == 1: pass\n    return x"
    found = score(code, ["assert f(0) == 0", "assert f(1) == 1", "assert f(2) == 2"], score="fraction", seconds=1.0)
    assert found["passed"] == pytest.approx(2 / 3)


def test_values_keep_their_types_and_arguments_their_changes() -> None:
    code = """
import collections
from dataclasses import dataclass
from enum import Enum, IntEnum

class Color(IntEnum):
    RED = 1

class Shape(Enum):
    ROUND = 1

Point = collections.namedtuple("Point", "x y")

@dataclass
class Pair:
    a: int
    def __add__(self, other): return Pair(self.a + other.a)

class OwnError(KeyError): pass

def same(x): return x
def point(): return Point(1, 2)
def color(): return Color.RED
def shape(): return Shape.ROUND
def fill(items, table): items.append(3); table["k"] = [1]; items.sort(reverse=True)
def apply(g, x): return g(g(x))
def numbers():
    yield 1
    yield 2
def fails(kind): raise {"own": OwnError("x"), "value": ValueError("bad")}[kind]
def node(n):
    class Node: pass
    one = Node(); one.value = n; one.next = node(n - 1) if n else None
    return one
"""
    cases = [
        "values = [1, 1.5, 1 + 2j, 'a', b'b', None, True, [1, (2, {3})], {'a': {(1, 2): 3}}, float('inf'), frozenset({1})]\n"
        "assert [same(each) for each in values] == values\nassert [type(same(each)) for each in values] == [type(each) for each in values]",
        "assert point() == (1, 2) and color() == 1 and shape().name == 'ROUND'",
        "items, table = [1, 2], {}\nassert fill(items, table) is None\nassert items == [3, 2, 1] and table == {'k': [1]}",
        "assert apply(lambda x: x + 1, 5) == 7\nseen = []\nassert apply(lambda x: seen.append(x) or x * 2, 1) == 4 and seen == [1, 2]",
        "assert list(numbers()) == [1, 2] and sum(numbers()) == 3",
        "try:\n    fails('value')\n    assert False\nexcept ValueError as error:\n    assert str(error) == 'bad'",
        "try:\n    fails('own')\n    assert False\nexcept OwnError:\n    pass\ntry:\n    fails('own')\nexcept KeyError:\n    pass",
        "assert (Pair(1) + Pair(2)).a == 3 and Pair(1) == Pair(1) and Pair(1) != Pair(2)",
        "one, found = node(3), []\nwhile one is not None:\n    found.append(one.value)\n    one = one.next\nassert found == [3, 2, 1, 0]",
        "import decimal, fractions, datetime\nfor each in (decimal.Decimal('1.10'), fractions.Fraction(1, 3), datetime.date(2024, 2, 29)):\n    assert same(each) == each",
    ]  # fmt: skip
    for case in cases:
        assert score(code, [case])["reward"] == 1.0, case


def test_fences() -> None:
    def found(text: str, language: str | None = None) -> tuple[str, str]:
        return extract_code(text, language, LANGUAGES)

    assert found("```python\na\n```\n```python\nb\n```") == ("python", "b\n")
    # A block without a language is an output, as a rule, where another one says that it is a program.
    assert found("```py\na\n```\n```\nout\n```") == ("python", "a\n")
    assert found("```\na\n```\n```\nb\n```\n```text\nc\n```") == ("python", "b\n")
    assert found("```\nint a;\n```\n```python\nb\n```", "cpp") == ("cpp", "int a;\n")
    assert found("<think>```python\nno\n```</think>```c++\nint main() {}\n```") == ("cpp", "int main() {}\n")
    assert found("```python\ncut off") == ("python", "cut off")
    assert found("print(1)") == ("python", "print(1)")
    assert found("```java\nclass A {}\n```") == ("python", "")  # no code that can run
    assert found("```js\n1\n```\n```text\n2\n```") == ("javascript", "1\n")
    assert found("```python\na\n```\n```cpp\nb\n```", "python") == ("python", "a\n")
    # CommonMark: the lines of an indented fence lose its indentation, and no more.
    assert found("  ```python\n  a\n  ```") == ("python", "a\n")
    listed = "1. Do this:\n   ```python\n   def f(x):\n       return x\n\n f(1)\n   ```\n2. Or that."
    assert found(listed) == ("python", "def f(x):\n    return x\n\nf(1)\n")
    assert found("- ```python\n  if a:\n    b\n  ```\n- c") == ("python", "if a:\n  b\n")
    assert found("\t```python\n\tif a:\n\t\tb\n\t```") == ("python", "if a:\n\tb\n")
    assert found("~~~python\na = '```'\n```\n~~~\nDone.") == ("python", "a = '```'\n```\n")
    assert found("````python\na\n```\nb\n````") == ("python", "a\n```\nb\n")
    assert found("```python\nx = '```'\n```") == ("python", "x = '```'\n")


FUNCTIONAL = [{"input": "2", "output": "4", "testtype": "functional"}]
METHOD = "class Solution:\n    def f(self, x: List[int]) -> int:\n        return {}"


@pytest.mark.parametrize(
    ("truth", "extra"),
    [
        ({"inputs": [[2]], "outputs": [4], "fn_name": "f"}, {}),  # verl's prime_code
        ({"test": "def check(c):\n    assert c(x=2) == 4", "entry_point": "Solution().f", "import_prefix": "from typing import *"}, {}),
        (FUNCTIONAL, {"func_name": "f"}),
        (FUNCTIONAL, {"metadata": {"func_name": "f"}}),
        (json.dumps(FUNCTIONAL), {"metadata": '{"func_name": "f"}'}),
        ({"inputs": [[2]], "outputs": [4], "testtype": "functional"}, {"fn_name": "Solution.f"}),
    ],
)  # fmt: skip
def test_methods_of_solution(truth: Any, extra: dict[str, Any]) -> None:
    assert score(METHOD.format("x * x"), truth, extra)["reward"] == 1.0
    assert score(METHOD.format("x + x + 1"), truth, extra)["reward"] == 0.0


def test_functional_tests_without_a_name_are_no_tests_of_standard_input() -> None:
    with raises(DataError, "fn_name", found=None, expected=re.compile("functional.*func_name")):
        read_tests(FUNCTIONAL, {"metadata": "{}"})


def test_arguments_by_name() -> None:
    truth = {"fn_name": "f", "inputs": [{"x": 3, "y": 1}, '{"x": 3}\n{"x": 1}'], "outputs": [2, 2]}
    code = "def f(x, y):\n    if isinstance(x, dict): x, y = x['x'], y['x']\n    return x - y"
    assert score(code, truth)["passed"] == 1.0  # text with a JSON value on each line is by position, as ever
    assert score(code.replace("x - y", "y - x"), truth)["passed"] == 0.0


def test_imports_before_the_code() -> None:
    prefix = {
        "assert_case": ["assert f([2]) == 4 and sqrt(4) == 2"],
        "import_prefix": "from math import *\nfrom typing import *",
    }
    code = "from __future__ import annotations\ndef f(x: List[int]) -> int: return pow(x[0], int(sqrt(4)))"
    assert score(code, prefix)["reward"] == 1.0
    assert score(code, ["assert f([2]) == 4"])["reward"] == 0.0  # nothing is imported for assertions
    # As verl's prime_code and LiveCodeBench: programs, and functions that are called, begin with these imports.
    called = {"fn_name": "f", "inputs": [[[2, 3]]], "outputs": [8]}
    assert score("def f(x: List[int]): return reduce(pow, x) * math.floor(1.5)", called)["reward"] == 1.0
    read = {"inputs": ["2 3"], "outputs": ["8"]}
    assert score("a, b = map(int, input().split())\nprint(comb(a, 1) * 4 * gcd(b, 1))", read)["reward"] == 1.0
    assert (
        score("from __future__ import annotations\na, b = map(int, input().split())\nprint(a ** b)", read)["reward"]
        == 1.0
    )
    assert score("", {"fn_name": "gcd", "inputs": [[4, 6]], "outputs": [2]})["reward"] == 0.0  # and are not the code's
    assert score("x = 1", {"fn_name": "gcd", "inputs": [[4, 6]], "outputs": [2]})["reward"] == 0.0


def test_annotations_are_evaluated_as_in_any_file() -> None:
    code = "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n"
    assert score(f"{code}def f(): return P.__annotations__['x'] is int", ["assert f()"])["reward"] == 1.0
    truth = {"inputs": [""], "outputs": ["True"]}
    assert score(f"{code}print(P.__annotations__['x'] is int)", truth)["reward"] == 1.0


@pytest.mark.parametrize(
    ("code", "test", "reward"),
    [
        ("def sum(a, b): return a + b", "assert sum(2, 3) == 5", 1.0),  # MBPP has tests of functions with such names
        ("def sum(a, b): return a + b", "assert set([sum(2, 3)]) == set([5])", 1.0),
        ("def sum(a, b): return a * b", "assert sum(2, 3) == 5", 0.0),
        ("def sum(a, b): return a + b", "assert sum(2, 3) == int('5')", 1.0),
        ("def sum(a, b): return 0\ndef int(x): return 0", "assert sum(2, 3) == int('5')", 0.0),
        ("def sum(a, b): return a + b\ndef abs(x): return 0", "assert abs(sum(2, 3) - 6) < 1", 0.0),
        ("x = 9\ndef abs(x): return 0", "assert abs(x - 4) < 1", 0.0),
        ("def f(x): return x\ndef g(x): return abs(x)\ndef abs(x): return 4", "assert g(f(2)) == 4", 1.0),  # its own
    ],
)
def test_a_builtin_is_the_codes_where_it_is_what_is_tested(code: str, test: str, reward: float) -> None:
    assert score(code, [test])["reward"] == reward


def test_functions_of_the_prompt_are_not_the_codes() -> None:
    # HumanEval/32 and 38 test the code with a function of the prompt.
    prompt = "import math\n\ndef poly(xs, x):\n    return xs[0] + xs[1] * x\n\ndef root(xs):\n    'poly(xs, root(xs)) is 0'\n"
    truth = {"test": "def check(c):\n    assert math.fabs(poly([2, 4], c([2, 4]))) < 1e-6", "entry_point": "root"}
    poly = "def poly(xs, x): return 0\n"
    for code in (
        "def root(xs): return -xs[0] / xs[1]",
        "    return -xs[0] / xs[1]",
        f"{poly}def root(xs): return -0.5",
    ):
        assert score(code, truth, {"prompt": prompt})["reward"] == 1.0
    for code in (f"{poly}def root(xs): return 0", f"    return 0\n\n{poly}"):
        assert score(code, truth, {"prompt": prompt})["reward"] == 0.0


def test_a_service_that_has_not_whets_files_runs_the_same_tests() -> None:
    told = {"kind": "code", "cases": ["assert f(2) == 4", "assert f(3) == 4"], "entry": "", "setup": "", "word": "W"}
    told |= {"imported": [], "tested": "", "tolerance": 0.0, "seconds": 5.0}
    frames = b"".join(map(frame, [json.dumps(["", SQUARE]), json.dumps(told)]))
    done = subprocess.run([sys.executable, "-I", "-c", PEER], input=frames, capture_output=True, timeout=60, check=True)
    assert [ok for ok, _ in json.loads(done.stdout.partition(b"\nW")[2])] == [True, False]


@pytest.mark.parametrize(
    ("found", "expected", "tolerance", "same"),
    [
        ("0.3333333333333333", "0.33333", 1e-5, True),  # 3.3e-6 off, of 1e-5 * (0.33333 + 0.001)
        ("0.3333333333333333", "0.33333", 0.0, False),
        ("0.3333333333333333", "0.33333", 1e-6, False),
        ("0.3334", "0.33333", 1e-5, False),
        ("a 1.0\n2", "a 1\n2", 1e-5, True),
        ("1000001", "1000000", 1e-3, False),  # both are whole
        ("1000001.0", "1000000", 1e-5, True),
        ("-1e-9", "0.0", 1e-5, True),  # 1e-8, as of numpy.allclose
        ("1e-7", "0.0", 1e-5, False),
        ("nan", "nan", 1e-5, True),  # the same text
        ("nan", "0.5", 1e-5, False),
        ("1e999", "0.5", 1e-5, False),
        ("0.5", "1e999", 1e-5, False),
        ("1_0.0", "10", 1e-5, False),
        ("0.5 0.5", "0.5\n0.5", 1e-5, False),
        ("0.5", "0.5 0.5", 1e-5, False),
    ],
)
def test_a_tolerance_of_numbers(found: str, expected: str, tolerance: float, same: bool) -> None:
    assert same_output(found, expected, tolerance) == same


def test_a_tolerance_of_values() -> None:
    truth = {"fn_name": "f", "inputs": [[1]], "outputs": [{"a": [0.3333333333, 5]}]}
    code = "def f(x): return {'a': (x / 3, 5)}"
    assert score(code, truth)["reward"] == 0.0
    assert score(code, truth, tolerance=1e-5)["reward"] == 1.0
    assert score(code.replace("x / 3", "x / 3.1"), truth, tolerance=1e-5)["reward"] == 0.0
    assert score(code.replace("5)", "5.000001)"), truth, tolerance=1e-5)["reward"] == 1.0
    assert score(code.replace("5)", "6)"), truth, tolerance=0.9)["reward"] == 0.0  # both are whole
    assert score("def f(x): return True", {**truth, "outputs": [1.000001]}, tolerance=1e-5)["reward"] == 0.0
    with raises(ConfigError, "reward.kwargs.tolerance", found=2):
        REWARDS["code"].check({"tolerance": 2}, "reward.kwargs.")


def test_outputs() -> None:
    assert same_output("1 2\n3\n", "1 2\n3") and same_output("1  2 \n\n\n", "1 2") and same_output("a\r\nb", "a\nb")
    assert not same_output("1 2 3", "1 2\n3") and not same_output("1.0", "1") and not same_output("", "0")


def test_a_response_that_goes_on_after_the_prompt() -> None:
    prompt = "import math\n\ndef root(x):\n    '''The root.'''\n"
    truth, extra = {"test": "def check(c):\n    assert c(9) == 3", "entry_point": "root"}, {"prompt": prompt}
    assert score("    return math.sqrt(x)", truth, extra)["reward"] == 1.0
    assert score("def root(x):\n    return math.sqrt(x)", truth, extra)["reward"] == 1.0  # with the prompt's imports
    own = {"test": "assert f(2) == 5\nassert f(0) == 1", "entry_point": "f", "prompt": "def f(x):  # 2x + 1\n return"}
    assert score(" 2*x+1", own)["reward"] == 1.0 and score(" 2*x-1", own)["reward"] == 0.0
    assert score("    return x", truth, extra)["reward"] == 0.0


@pytest.mark.parametrize(
    ("truth", "found"),
    [
        ("what", "'what'"),
        ({"a": 1}, "a"),
        ([{"box": [1, 2], "label": "cat"}], "[{'box': [1, 2], 'label': 'cat'}]"),
        ([], "[]"),
        (7, "7"),
        ({"inputs": ["1"], "outputs": []}, re.compile(r"^1\b.*\b0\b")),
        ({"inputs": [], "outputs": []}, "{'inputs': [], 'outputs': []}"),
    ],
)
def test_ground_truths_without_tests(truth: Any, found: object) -> None:
    with raises(DataError, re.compile("ground_truth$"), found=found):
        read_tests(truth, {})


def test_no_code_and_unknown_languages() -> None:
    assert compute_score("```java\nclass A {}\n```", ["assert f(1)"], sandbox="unisolated")["reward"] == 0.0
    assert compute_score("```cpp\nint f;\n```", ["assert f(1)"], sandbox="unisolated")["reward"] == 0.0
    with raises(DataError, "language", found="cobol", expected=re.compile(": python, cpp")):
        compute_score("x", ["assert f(1)"], language="cobol", sandbox="unisolated")
    lost = {"lost": {"file": "a", "run": ["no-such-tool"]}}
    with raises(SandboxError, "language lost", found=re.compile("^no-such-tool "), change=re.compile("paths")):
        compute_score("```lost\nx\n```", {"inputs": ["1"], "outputs": ["1"]}, sandbox="unisolated", languages=lost)


@needs_bubblewrap
@pytest.mark.slow
@pytest.mark.skipif(not HUMAN_EVAL.exists(), reason="HumanEval is not beside the repository (shared/data)")
def test_human_eval_and_its_mutants() -> None:
    """Every canonical solution passes; every mutant has the same verdict as in a run without any sandbox, and
    docs/mutants.md lists the mutants that pass."""
    unpaid, found = of_human_eval()
    assert not unpaid
    assert len(found) >= 500
    assert not [each for each in found if each.is_paid != each.passes]
    assert PAGE.read_text(encoding="utf-8") == page(found), "run `python -m tests.plugins.scores.mutants`"


@needs_bubblewrap
def test_folders_of_toolchains_are_an_option() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        Path(folder, "double").write_text("#!/bin/sh\nread a; echo $((a + a))\n")
        Path(folder, "double").chmod(0o755)
        table = {"twice": {"file": "a.txt", "run": ["double"]}}
        answer, truth = "```twice\nanything\n```", {"inputs": ["21"], "outputs": ["42"]}
        with raises(SandboxError, "language twice", found=re.compile("^double ")):
            compute_score(answer, truth, languages=table)
        assert compute_score(answer, truth, languages=table, paths=[folder])["reward"] == 1.0
