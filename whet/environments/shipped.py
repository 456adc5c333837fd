# SPDX-License-Identifier: Apache-2.0
"""Environments that ship: of tasks with one turn, a prompt and a response; and a calculator, a minimal tool."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable

from whet.environments.protocol import ENDS, Observation
from whet.registry import register_environment
from whet.types import Message, Prompt

Number = int | float
OPERATORS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@register_environment("calculator", pure=True)
class Calculator:
    """A calculator: replies to <calc>expression</calc> with the value; a turn without one ends the episode."""

    def __init__(self, prompt: Prompt, *, role: str = "tool") -> None:
        self.role = role

    def step(self, answer: str) -> Observation:
        """Computes the last expression of the turn."""
        calls = (part.partition("</calc>") for part in reversed(answer.split("<calc>")[1:]))  # in linear time
        expression = next((text for text, closing, _ in calls if closing), None)
        if expression is None:
            return Observation(done=True)
        return Observation(done=False, messages=(Message(self.role, calculate(expression)),))


def calculate(expression: str) -> str:
    """The value of an arithmetic expression of numbers, + - * / and brackets, as text; else an error message.

    Integers are exact; other values have up to 12 digits.
    """
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
        if not math.isfinite(value):
            raise OverflowError
        return str(value) if isinstance(value, int) else f"{value:.12g}"
    except ZeroDivisionError:
        return "error: division by zero"
    except OverflowError:
        return "error: too large"
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two from expressions nested too deeply
        return "error: not arithmetic"


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(left), _value(right))
    raise ValueError(f"{type(node).__name__} is not arithmetic")


@register_environment("single_turn", pure=True, max_turns=1, silent=True)
class SingleTurn:
    """An environment whose episode ends after the first turn. It is `silent`: as it says nothing, nobody runs it."""

    def __init__(self, prompt: Prompt) -> None:
        pass

    def step(self, answer: str) -> Observation:
        """Returns the end of the episode."""
        return ENDS
