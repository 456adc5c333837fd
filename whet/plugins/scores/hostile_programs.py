# SPDX-License-Identifier: Apache-2.0
"""Wrong programs that no grader should reward, derived from the tests of a row."""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterator, Mapping

from whet.files import shipped_yaml
from whet.plugins.scores.code import Suite, called_names, parsed, read_tests

WRONG = -987654321  # returned where a function is tested
PROGRAMS = shipped_yaml("plugins/scores/probes.yaml")["programs"]


def _tests(truth: object, extra: Mapping[str, object]) -> Suite | None:
    """Returns the tests in a ground truth; None if the ground truth has no tests."""
    try:
        tests = read_tests(truth, extra)
    except (AttributeError, TypeError, ValueError):
        return None
    is_code = tests.kind != "code" or any(re.search(r"\bassert\b|\bdef check\b", each) for each in tests.cases)
    return tests if is_code else None


def programs(truth: object, extra: Mapping[str, object]) -> Iterator[str]:
    """Yields wrong responses for a ground truth with tests. Their programs exit before the tests, return an object that
    equals every value, replace builtins, replace or read the tests, or write nearly the expected output."""
    tests = _tests(truth, extra)
    if tests is None:
        return
    if tests.kind == "stdin":
        given, expected = tests.cases[0]
        told = [f"print({'7' + expected!r})", f"print({expected!r})\nprint({expected!r})\nprint(7)"]
        told += [PROGRAMS["leaves"], "print(True)\nprint('passed')", PROGRAMS["reads"] + "print(found())\nprint(7)"]
        if given.strip() + "7" != expected.strip():
            told.append("import sys\nsys.stdout.write(sys.stdin.read() + '7')")
    else:
        told = [PROGRAMS["leaves"], _defined(tests, f"{WRONG}") + "import sys\nsys.exit(0)\n"]
        told += [PROGRAMS["equals_all"] + _defined(tests, "Any()"), PROGRAMS["shadows"] + _defined(tests, f"{WRONG}")]
        told += [PROGRAMS["conftest"] + _defined(tests, f"{WRONG}"), PROGRAMS["reads"] + _defined(tests, "found(*a)")]
    yield from (f"```python\n{program.strip()}\n```" for program in told)


def _defined(tests: Suite, value: str) -> str:
    """Returns code that defines the tested names as functions that return the expression `value`."""
    name, _, method = (tests.entry or tests.defines).partition(".")
    if method:
        return f"\nclass {name}:\n    def {method}(self, *a, **k): return {value}\n"
    names = [name]
    if not name:
        tree = parsed("\n".join(tests.cases))
        names = sorted({*called_names([tree] if tree else [])} - {*vars(builtins)})
    return "\n" + "".join(f"def {each}(*a, **k): return {value}\n" for each in names)
