# SPDX-License-Identifier: Apache-2.0
"""Countdown: make a number from others, each used once."""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable
from fractions import Fraction

from whet.errors import ConfigError
from whet.options import Count, NonNegative
from whet.registry import register_environment
from whet_environments.game import Context, Encoding, Game, Outcome

OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
SIGNS = "+-*/"
ANSWER = re.compile(r"<answer>([^<]*)</answer>")
MOST_CHARACTERS = 300  # of an expression
MOST_DRAWS = 10_000


@register_environment("countdown", pure=True)
class Countdown(Game):
    """Countdown: an expression of the given numbers, each used exactly once, whose value is the target, pays 1.

    The signs are + - * / and brackets, and the value is exact. There are `max_steps` tries; an answer that is no
    expression of these numbers costs `format_penalty`. The target is from 1 to `highest_target`, and is made from an
    expression of the numbers, so that there is one.
    """

    def __init__(
        self,
        *,
        numbers: Count = 4,
        highest: Count = 25,
        highest_target: Count = 100,
        format_penalty: NonNegative = 0.1,
        max_steps: Count = 3,
        encoding: Encoding = "words",
        context: Context = "append",
        max_tokens: Count | None = None,
    ) -> None:
        super().__init__(max_steps=max_steps, encoding=encoding, context=context, max_tokens=max_tokens)
        if not 2 <= numbers <= 8:
            raise ConfigError("environment.options.numbers", numbers, "2 to 8 numbers in an expression")
        self.num_numbers, self.highest, self.highest_target = numbers, highest, highest_target
        self.format_penalty = format_penalty
        self.rules = (
            "Make the target from the numbers, each used exactly once, with + - * / and brackets. "
            "Answer with an expression: <answer>(1 + 2) * 3</answer>."
        )

    def begin(self, draws: random.Random) -> None:
        """Draws numbers and a target that they make."""
        for _ in range(MOST_DRAWS):
            self.given = [draws.randint(1, self.highest) for _ in range(self.num_numbers)]
            self.solution = _expression(self.given, draws)
            value = evaluate(self.solution)
            if value is not None and value[0].denominator == 1 and 1 <= value[0] <= self.highest_target:
                break
        else:
            raise ConfigError(
                "environment.options.highest_target",
                self.highest_target,
                f"a target from 1 to it in {MOST_DRAWS} draws",
                "raise it",
            )
        self.target, self.is_won, self._draws = int(value[0]), False, draws

    def play(self, text: str) -> Outcome:
        """Computes the expression."""
        expression = self._read(text)
        found = None if expression is None else evaluate(expression)
        if found is None:
            return -self.format_penalty, False, "That is no expression."
        value, used = found
        if sorted(used) != sorted(self.given):
            return -self.format_penalty, False, "That does not use each number exactly once."
        self.is_won = value == self.target
        return float(self.is_won), self.is_won, f"That is {str(value)[:40]}, not {self.target}."

    def _read(self, text: str) -> str | None:
        if self.encoding == "compact":
            return text
        found = ANSWER.findall(text)
        return found[-1] if found else None

    def board(self) -> str:
        """The numbers and the target."""
        if self.encoding == "compact":
            return f"{' '.join(map(str, self.given))}={self.target}"
        return f"Numbers: {', '.join(map(str, self.given))}. Target: {self.target}."

    def best(self) -> str:
        """The expression that made the target."""
        return self._write(self.solution)

    def choices(self) -> list[str]:
        """An expression of the numbers, drawn at random."""
        return [self._write(_expression(self.given, self._draws))]

    def _write(self, expression: str) -> str:
        return expression if self.encoding == "compact" else f"<answer>{expression}</answer>"


def _expression(numbers: list[int], draws: random.Random) -> str:
    """A random expression of all numbers."""
    parts = [str(number) for number in numbers]
    draws.shuffle(parts)
    while len(parts) > 1:
        place = draws.randrange(len(parts) - 1)
        parts[place : place + 2] = [f"({parts[place]}{draws.choice(SIGNS)}{parts[place + 1]})"]
    return parts[0][1:-1] if parts[0].startswith("(") else parts[0]


def evaluate(expression: str) -> tuple[Fraction, list[int]] | None:
    """The value of an expression of whole numbers, and the numbers in it; None if it is none, or divides by 0."""
    if len(expression) > MOST_CHARACTERS:
        return None
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
        used = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        return _value(tree), [number for number in used if type(number) is int]
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return Fraction(number)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(left), _value(right))
    raise ValueError("no expression")
