# SPDX-License-Identifier: Apache-2.0
"""Shipped environments: a calculator as a minimal tool, and gymnasium's environments with actions and observations as
text."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from operator import methodcaller
from typing import Any

from whet.environments.protocol import Answer, Observation, SingleTurn as SingleTurn  # for code of 0.3
from whet.errors import ConfigError, describe
from whet.options import Finite
from whet.registry import load_target, register_environment
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
    """Replies to <calc>expression</calc> with the value; a turn without an expression ends the episode."""

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
    """Returns the value of an arithmetic expression of numbers, + - * / and brackets, as text; else an error message.

    Integers are exact; other values have up to 12 digits."""
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


NUMBER = r"(?<![\w.-])-?[0-9]+(?:\.[0-9]+)?(?!\w|\.[0-9])"


@register_environment("gymnasium")
class Gymnasium:
    """An environment of gymnasium with discrete actions. The action of a turn is its last word from `actions`, or
    without `actions` its last number if that is an action. A turn without an action takes no step, and gets the reply
    `invalid_text` and the reward `invalid_reward`. The model reads gymnasium's observation as text; with `render=true`
    the environment's own text (ansi), or with `render=package.module:name` this function's text. `success` is 1 if a
    step terminates the episode with a reward of at least `success_reward` (CliffWalking: -1). By default any reward
    above 0 is enough, but there is no `success` if an earlier step pays above 0 too (CartPole)."""

    def __init__(
        self,
        *,
        env_id: str,
        kwargs: Mapping[str, Any] | None = None,
        actions: Sequence[str] = (),
        render: bool | str = False,
        invalid_reward: Finite = 0.0,
        success_reward: Finite | None = None,
        invalid_text: str = "There is no such action. Answer with one of: {actions}",
        role: str = "user",
    ) -> None:
        try:
            import gymnasium
        except ImportError as error:
            needs = "the package gymnasium"
            raise ConfigError("environment.name", "gymnasium", needs, "run pip install gymnasium") from error

        options: dict[str, Any] = {**(kwargs or {}), **({"render_mode": "ansi"} if render is True else {})}
        key = "environment.options.env_id"
        try:
            self.env = gymnasium.make(env_id, **options)
        except ModuleNotFoundError as error:
            absent = error.name or env_id.partition(":")[0]
            change = f"run pip install {absent}, or put its folder on PYTHONPATH"
            raise ConfigError(key, f"{env_id} ({error})", f"the package {absent}", change) from error
        except gymnasium.error.Error as error:
            raise ConfigError(key, f"{env_id} ({error})", "an id that gymnasium knows") from error
        except Exception as error:  # the constructor of the environment
            found, expected = f"{dict(kwargs or {})} ({describe(error)})", f"what {env_id} takes"
            raise ConfigError("environment.options.kwargs", found, expected, "correct it") from error
        count = getattr(self.env.action_space, "n", None)
        if count is None:
            found = f"{env_id} with the actions {self.env.action_space}"
            change = "write an environment of your own that reads them from the text"
            raise ConfigError(key, found, "discrete actions", change)
        first = int(getattr(self.env.action_space, "start", 0))
        words = list(actions) or [str(first + number) for number in range(int(count))]
        self.actions = {word.lower(): first + number for number, word in enumerate(words)}
        if not len(words) == len(self.actions) == int(count):
            expected = f"{count} different words, for the actions of {env_id} in their order"
            raise ConfigError("environment.options.actions", f"{len(words)} words", expected)
        self.invalid_text = invalid_text.replace("{actions}", ", ".join(words))
        self.invalid_reward, self.role, self.is_over = invalid_reward, role, False
        self.success_reward, self.pays_before_the_end = success_reward, False
        self.render = load_target(render) if isinstance(render, str) else methodcaller("render") if render else None
        longest_first = sorted(map(re.escape, words), key=len, reverse=True)
        self.pattern = re.compile(rf"(?<!\w)({'|'.join(longest_first)})(?!\w)" if actions else NUMBER, re.IGNORECASE)

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        """Resets the environment; the seed determines the map and all draws."""
        seen, _ = self.env.reset(seed=seed % 2**31)
        self.is_over = self.pays_before_the_end = False
        return Observation(done=False, **self._shown(seen))

    def step(self, answer: Answer) -> Observation:
        """Takes the action that the turn names.  Raises: RuntimeError after the end of the episode."""
        if self.is_over:
            raise RuntimeError("step was called after the end of the episode; call reset first")
        found = self.pattern.findall(answer.text)
        action = self.actions.get(found[-1].lower()) if found else None
        if action is None:
            messages = (Message(self.role, self.invalid_text),)
            return Observation(done=False, messages=messages, reward=self.invalid_reward, fields={"invalid": 1.0})
        seen, reward, terminated, truncated, _ = self.env.step(action)
        self.is_over = bool(terminated or truncated)
        return Observation(
            done=bool(terminated),
            truncated=bool(truncated and not terminated),
            reward=float(reward),
            fields=self._success(float(reward), bool(terminated)),
            **self._shown(seen),
        )

    def close(self) -> None:
        """Closes the environment."""
        self.env.close()

    def _success(self, reward: float, is_terminated: bool) -> dict[str, float]:
        if self.success_reward is not None:
            return {"success": float(is_terminated and reward >= self.success_reward)}
        self.pays_before_the_end |= reward > 0 and not self.is_over
        return {} if self.pays_before_the_end else {"success": float(is_terminated and reward > 0)}

    def _shown(self, seen: Any) -> dict[str, Any]:
        text = str(self.render(self.env) if self.render else seen)
        return {"messages": (Message(self.role, text),), "state_key": text}
