# SPDX-License-Identifier: Apache-2.0
"""Repair of a broken Python function, with its tests in the sandbox.

whet env play python_repair --seed 1
"""

from __future__ import annotations

import ast
import asyncio
import copy
import inspect
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from whet.environments.protocol import Answer, Observation
from whet.errors import ConfigError, SandboxError
from whet.options import Count, NonNegative, Positive, Share
from whet.plugins.scores.code import Suite, extract_code, run_tests
from whet.programs.protocol import Limits, open_sandbox
from whet.registry import register_environment
from whet.types import Message, Prompt
from whet_environments.small_functions import CALLS

MOST_DRAWS = 100  # of a mutant that fails a test
MOST_READ = 20_000  # characters of an answer
ENDLESS = re.compile(r"^(it took too long|MemoryError|timeout|memory)")  # which of them comes first is chance
ADDRESS = re.compile(r"\b0x[0-9a-f]+")  # of an object; it differs from run to run
COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], tuple[type[ast.operator], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Add,),
    ast.FloorDiv: (ast.Mult,),
    ast.Div: (ast.Mult,),
    ast.Mod: (ast.FloorDiv,),
}


@dataclass(frozen=True)
class Function:
    """A correct function with its tests: arguments and the values that they give."""

    name: str
    source: str
    tests: Suite


@register_environment("python_repair", shared=True)
class PythonRepair:
    """A broken Python function and a test that fails: each answer is a new program, in a fenced block or without one,
    whose tests run in the sandbox. 1 when all tests pass, times `turn_discount` for each turn before; an answer without
    code costs `format_penalty`.

    The seed chooses one of 25 functions and `mutations` faults in it (an operator, a number, a condition), until a test
    fails; a row of the data set may fix it by a field `seed`. An observation says how many tests fail and shows the
    first, in at most `max_characters`. With `context=replace` it has the task and the last program too. `seconds` and
    `memory_mb` limit a test; `sandbox` is bubblewrap, an address of a SandboxFusion service, or unisolated.
    Fields: `success`, `passed` (the share of the tests), `turns`.
    """

    def __init__(
        self,
        *,
        mutations: Count = 1,
        turn_discount: Share = 1.0,
        format_penalty: NonNegative = 0.0,
        max_steps: Count = 4,
        max_characters: Count = 600,
        context: Literal["append", "replace"] = "append",
        max_tokens: Count | None = None,
        sandbox: str = "bubblewrap",
        seconds: Positive = 1.0,
        memory_mb: Count = 256,
    ) -> None:
        try:
            self.box = open_sandbox(sandbox)
        except SandboxError as error:
            raise ConfigError("environment.options.sandbox", f"{sandbox} ({error})", "a sandbox that starts") from error
        self.mutations, self.turn_discount, self.format_penalty = mutations, turn_discount, format_penalty
        self.max_steps, self.max_characters, self.context, self.max_tokens = (
            max_steps,
            max_characters,
            context,
            max_tokens,
        )
        self.limits = Limits(seconds=seconds, cpu_seconds=seconds, memory_bytes=memory_mb * 2**20)
        self.is_over = True

    async def reset(self, prompt: Prompt, seed: int) -> Observation:
        """Breaks a function.  Raises: SandboxError, ValueError for a field `seed` that is no number."""
        own = prompt.extra_info.get("seed")
        if own is not None and not isinstance(own, int):
            raise ValueError(f"the row's field seed is {own!r}; expected a whole number that names the function")
        draws = random.Random(seed if own is None else own)
        self.function, self.turns, self.is_over, self.passed = draws.choice(functions()), 0, False, 0.0
        for _ in range(MOST_DRAWS):
            self.program = broken(self.function.source, self.mutations, draws)
            said, is_solved = await self._tested()
            if not is_solved:
                return self._observe(said, 0.0, is_first=True)
        raise RuntimeError(f"{MOST_DRAWS} mutants of {self.function.name} passed all tests")

    async def step(self, answer: Answer) -> Observation:
        """Tests a program.  Raises: RuntimeError after the end, SandboxError."""
        if self.is_over:
            raise RuntimeError("step was called after the end of the task, or before reset; call reset first")
        self.turns += 1
        _, source = extract_code(answer.text[-MOST_READ:], "python", ("python",))
        said, is_solved, reward = "There is no code in the answer.", False, 0.0 - self.format_penalty
        if source.strip():
            self.program = source
            said, is_solved = await self._tested()
            reward = self.turn_discount ** (self.turns - 1) if is_solved else 0.0
        is_truncated = not is_solved and self.turns == self.max_steps
        self.is_over = is_solved or is_truncated
        return self._observe(said, reward, is_done=is_solved, is_truncated=is_truncated)

    def __deepcopy__(self, memo: dict[int, Any]) -> PythonRepair:
        """A copy of the episode that shares the sandbox: nothing else in it changes in place."""
        return copy.copy(self)

    async def _tested(self) -> tuple[str, bool]:
        """The output of the program's tests, and whether it passes them."""
        tests = self.function.tests
        results = await asyncio.to_thread(run_tests, self.box, "python", self.program, tests, self.limits)
        failed = [(case, why) for case, (is_ok, why) in zip(tests.cases, results, strict=True) if not is_ok]
        self.passed = 1 - len(failed) / len(results)
        if not failed:
            return f"All {len(results)} tests pass.", True
        case, why = failed[0]
        why = "it takes too long, or too much memory" if ENDLESS.match(why) else ADDRESS.sub("0x..", why.strip())
        call = f"{self.function.name}({', '.join(map(repr, case['args']))})"
        said = f"{len(failed)} of {len(results)} tests fail. The first is {call}: {why}"
        cut = said[: self.max_characters]
        return (cut if cut == said else f"{cut} ..."), False

    def _observe(
        self, said: str, reward: float, *, is_first: bool = False, is_done: bool = False, is_truncated: bool = False
    ) -> Observation:
        if is_first or self.context == "replace":
            task = "Correct this Python function. Answer with the whole function in a fenced block of Python."
            said = f"{task}\n\n```python\n{self.program[:MOST_READ]}\n```\n\n{said}"
        return Observation(
            done=is_done,
            truncated=is_truncated,
            messages=(Message("user", said),),
            reward=reward,
            fields={"success": float(is_done), "passed": self.passed, "turns": float(self.turns)},
            context=self.context,
            max_tokens=self.max_tokens,
        )

    def choices(self) -> list[str]:
        """The program as it is, a correct one, and one that does not compile."""
        return [f"```python\n{text}\n```" for text in (self.program, self.function.source, "def f(:")]


def functions() -> list[Function]:
    """All functions, in a fixed order."""
    return [_function(each, calls) for each, calls in CALLS.items()]


def _function(function: Callable[..., Any], calls: list[tuple[Any, ...]]) -> Function:
    source = ast.unparse(ast.parse(inspect.getsource(function)))
    cases = [{"args": [*arguments], "expected": function(*arguments)} for arguments in calls]
    return Function(function.__name__, source, Suite("call", cases, function.__name__))


def broken(source: str, mutations: int, draws: random.Random) -> str:
    """The source with faults, each drawn from all that are possible."""
    for _ in range(mutations):
        source = draws.choice([*mutants(source)])
    return source


def mutants(source: str) -> Iterator[str]:
    """Yields the source with one fault, for every place of one; some may behave as the source does."""
    places = len([*_faults(ast.parse(source))])
    for place in range(places):
        tree = ast.parse(source)
        [*_faults(tree)][place]()
        yield ast.unparse(tree)


def _faults(tree: ast.Module) -> Iterator[Callable[[], None]]:
    """Yields functions that each make one fault in the tree, in a fixed order."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare(ops=ops):
                for index, operator in enumerate(ops):
                    for kind in COMPARISONS.get(type(operator), ()):
                        yield _setter(ops, index, kind())
            case ast.BinOp(op=operator) | ast.AugAssign(op=operator):
                for arithmetic in ARITHMETIC.get(type(operator), ()):
                    yield _setter(node, "op", arithmetic())
            case ast.BoolOp(op=operator):
                yield _setter(node, "op", ast.Or() if isinstance(operator, ast.And) else ast.And())
            case ast.Constant(value=bool() as value):
                yield _setter(node, "value", not value)
            case ast.Constant(value=int() as value):
                yield _setter(node, "value", value + 1)
                yield _setter(node, "value", value - 1)
            case ast.If(test=test) | ast.IfExp(test=test):
                yield _setter(node, "test", ast.UnaryOp(ast.Not(), test))


def _setter(owner: Any, place: int | str, value: Any) -> Callable[[], None]:
    def change() -> None:
        if isinstance(place, int):
            owner[place] = value
        else:
            setattr(owner, place, value)

    return change
