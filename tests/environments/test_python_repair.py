# SPDX-License-Identifier: Apache-2.0
"""Repair of broken functions: the faults, and the task with its tests in the sandbox."""

import ast
import asyncio
import copy
import random
import re
from typing import Any

import pytest
from whet_environments import python_repair
from whet_environments.python_repair import PythonRepair, broken, functions, mutants
from whet_environments.small_functions import CALLS

from tests.plugins.sandbox.conftest import needs_bubblewrap
from tests.raising import raises
from whet.environments.protocol import Answer, Observation
from whet.errors import ConfigError
from whet.plugins.agents.check import Plan, check
from whet.plugins.scores.code import Suite, run_tests
from whet.programs.protocol import open_sandbox
from whet.types import Message, Prompt

PROMPT = Prompt("0:7", 7, (Message("user", "?"),), (1, 2), "s", None)


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__name__)
def test_the_example_in_the_docstring_holds(function: Any) -> None:
    found = re.search(rf"({function.__name__}\(.*\)) is (.*)\.$", function.__doc__)
    assert found is not None
    assert eval(found[1], {function.__name__: function}) == ast.literal_eval(found[2])


def test_there_are_enough_functions_with_tests() -> None:
    found = functions()
    assert len(found) == len({each.name for each in found}) == 25
    assert all(len(each.tests.cases) >= 4 and each.tests.entry == each.name for each in found)


def test_every_place_of_a_fault() -> None:
    source = "def f(a):\n    return a < 3 and a + 1 != 4"
    assert [mutant.removeprefix("def f(a):\n    return ") for mutant in mutants(source)] == [
        "a < 3 or a + 1 != 4",
        "a <= 3 and a + 1 != 4",
        "a > 3 and a + 1 != 4",
        "a < 3 and a + 1 == 4",
        "a < 4 and a + 1 != 4",
        "a < 2 and a + 1 != 4",
        "a < 3 and a - 1 != 4",
        "a < 3 and a + 1 != 5",
        "a < 3 and a + 1 != 3",
        "a < 3 and a + 2 != 4",
        "a < 3 and a + 0 != 4",
    ]


def test_other_faults() -> None:
    source = "def f(a):\n    if a:\n        return True"
    bodies = {ast.unparse(ast.parse(mutant).body[0].body[0]) for mutant in mutants(source)}
    assert bodies == {"if not a:\n    return True", "if a:\n    return False"}


def test_mutants_compile_differ_and_keep_the_description() -> None:
    for function in functions():
        found = [*mutants(function.source)]
        assert len(set(found)) > 1 and function.source not in found
        description = ast.get_docstring(ast.parse(function.source).body[0])
        assert all(ast.get_docstring(ast.parse(each).body[0]) == description for each in found)


def test_faults_depend_on_the_seed_alone() -> None:
    source = functions()[0].source
    one, same, other = (broken(source, 3, random.Random(seed)) for seed in (5, 5, 6))
    assert one == same != other


def begun(seed: int = 1, **options: Any) -> tuple[PythonRepair, Observation]:
    task = PythonRepair(**options)
    return task, asyncio.run(task.reset(PROMPT, seed))


def answered(task: PythonRepair, text: str) -> Observation:
    return asyncio.run(task.step(Answer(text)))


def text_of(observation: Observation) -> str:
    return str(observation.messages[0].content)


@needs_bubblewrap
def test_a_repair() -> None:
    task, first = begun(turn_discount=0.5, format_penalty=0.2)
    assert task.program in text_of(first) and " tests fail. The first is greatest_common_divisor(" in text_of(first)
    no_code = answered(task, "```text\nI do not know.\n```")
    assert (no_code.reward, text_of(no_code)) == (-0.2, "There is no code in the answer.")
    wrong = answered(task, "```python\ndef greatest_common_divisor(a, b):\n    return 6\n```")
    assert wrong.reward == 0.0 and not wrong.done and wrong.fields["passed"] == pytest.approx(1 / 6)
    assert text_of(wrong) == (
        "5 of 6 tests fail. The first is greatest_common_divisor(7, 5): AssertionError: returned 6; expected 1"
    )
    right = answered(task, f"It was the sign.\n```python\n{task.function.source}\n```")
    assert (right.reward, right.done) == (0.25, True)
    assert right.fields == {"success": 1.0, "passed": 1.0, "turns": 3.0}
    with pytest.raises(RuntimeError, match="after the end"):
        answered(task, "x")


@pytest.mark.slow
@needs_bubblewrap
def test_limits_of_turns_and_of_observations() -> None:
    task, first = begun(max_steps=2, max_characters=80, context="replace", max_tokens=9)
    assert (first.context, first.max_tokens) == ("replace", 9)
    raises = "raise ValueError('x' * 1000)"
    seen = [answered(task, raises) for _ in range(2)]
    assert [each.truncated for each in seen] == [False, True]
    assert f"```python\n{raises}\n```" in text_of(seen[0])
    assert text_of(seen[0]).endswith(" ...") and len(text_of(seen[0]).rpartition("```")[2]) == 80 + len("\n\n ...")


@pytest.mark.slow
@needs_bubblewrap
def test_a_program_that_never_ends() -> None:
    task, _ = begun(seconds=0.3)
    last = answered(task, "def greatest_common_divisor(a, b):\n    while True:\n        pass")
    assert text_of(last).endswith("greatest_common_divisor(12, 18): it takes too long, or too much memory")


@needs_bubblewrap
def test_a_mutant_that_passes_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    def draw(source: str, mutations: int, draws: random.Random) -> str:
        drawn.append(source if len(drawn) < 2 else source.replace("return a", "return b"))
        return drawn[-1]

    monkeypatch.setattr(python_repair, "broken", draw)
    task, first = begun()
    assert len(drawn) == 3 and task.program == drawn[-1] and " tests fail" in text_of(first)


def test_an_absent_sandbox_is_named() -> None:
    with raises(ConfigError, "environment.options.sandbox", found=re.compile("^docker .*bubblewrap")):
        PythonRepair(sandbox="docker")


@needs_bubblewrap
@pytest.mark.slow
def test_the_functions_are_right_and_the_tasks_are_broken() -> None:
    box = open_sandbox("bubblewrap")
    for function in functions():
        results = run_tests(box, "python", function.source, function.tests, PythonRepair().limits)
        assert results == [(True, "")] * len(function.tests.cases), function.name
    names = set()
    for seed in range(40):
        task, _ = begun(seed)
        tests: Suite = task.function.tests
        assert not all(ok for ok, _ in run_tests(box, "python", task.program, tests, task.limits)), seed
        names.add(task.function.name)
    assert len(names) > 15


@needs_bubblewrap
@pytest.mark.slow
def test_it_passes_the_check() -> None:
    found = {
        each.name: each
        for each in check("whet_environments.python_repair:PythonRepair", {}, Plan(PROMPT, seconds=60.0))
    }
    assert not [finding for finding in found.values() if finding.is_ok is False]
    assert found["restores"].what == "a copy after a turn goes on alike"


@needs_bubblewrap
def test_a_copy_goes_on_alike_and_shares_the_sandbox() -> None:
    task, _ = begun(3, max_steps=3)
    wrong = task.program
    answered(task, "def f(:")
    copied = copy.deepcopy(task)
    assert copied.box is task.box and copied.program == "def f(:"
    first = answered(task, wrong)
    assert (copied.turns, copied.program) == (1, "def f(:")  # turns of the one are none of the other
    assert answered(copied, wrong) == first and not first.done
    assert answered(copied, task.function.source).done and not task.is_over
