# SPDX-License-Identifier: Apache-2.0
"""The forms in which people write environments, each called by `reset`, `step` and `close` of the long form.

| form | reset | step |
|---|---|---|
| long | `reset(prompt, seed)` returns an Observation | `step(answer)` gets an Answer, returns an Observation |
| short | | `step(text)` returns an Observation |
| gymnasium, GEM | `reset(seed=)` returns (text, info) | `step(text)` returns (text, reward, ended, truncated, info) |
| function | | is the step: gets the text; returns a reply, None for the end, or (reply, reward) |

Methods may be async. A `reset` or `step` with one more parameter, `context`, can run tasks of sub-agents.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from whet.environments.protocol import Answer, Closes, Observation, Resets, Result, Task
from whet.types import Message

_text = attrgetter("text")  # of an Answer


class Context:
    """Runs tasks of sub-agents for one episode."""

    def __init__(self) -> None:
        self._asked: list[tuple[Task, asyncio.Future[Result]]] = []
        self._running: list[asyncio.Future[Result]] = []  # of the tasks in the last observation
        self._is_asked = asyncio.Event()

    async def run(self, task: str | Sequence[Message], agent: str, **given: Any) -> Result:
        """Runs an episode of `agent`, one of `environment.agents`: `task` is its conversation, or the user's message in
        it; `given` may have ground_truth and extra_info. Tasks that are awaited together run side by side."""
        messages = (Message("user", task),) if isinstance(task, str) else tuple(task)
        future = asyncio.get_running_loop().create_future()
        self._asked.append((Task(agent, messages, **given), future))
        self._is_asked.set()
        return await future

    async def until_asked(self, call: asyncio.Future[Any]) -> Any:
        """The result of a call, or an Observation with the tasks that it waits for."""
        asked = asyncio.ensure_future(self._is_asked.wait())
        try:
            await asyncio.wait({call, asked}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
        if call.done():
            return call.result()
        tasks, self._asked = self._asked, []
        self._is_asked.clear()
        self._running = [future for _, future in tasks]
        return Observation(done=False, tasks=tuple(task for task, _ in tasks))

    def give(self, results: Sequence[Result]) -> None:
        """Gives the results of the tasks in the last observation."""
        for future, result in zip(self._running, results, strict=True):
            if not future.done():
                future.set_result(result)


@dataclass(frozen=True)
class Form:
    """The form of a class, which is found once: its methods are called for every turn."""

    resets: Callable[..., Any] | None  # called with the environment, the prompt and the seed
    reads: Callable[[Answer], Any]  # the argument of `step`
    converts: Callable[[Any], Any]  # what `reset` and `step` return, to an Observation
    has_close: bool
    contexts: tuple[bool, bool]  # whether `reset` and `step` have the parameter `context`

    @classmethod
    def of(cls, environment: Any) -> Form:
        """The form of an environment's class."""
        names = tuple("context" in _parameters(getattr(environment, each, None)) for each in ("reset", "step"))
        contexts = (names[0], names[1])
        has_close = isinstance(environment, Closes)
        if not isinstance(environment, Resets):
            return cls(None, _text, read_reply if isinstance(environment, StepFunction) else same, has_close, contexts)
        if _is_gymnasium(environment.reset):
            return cls(
                lambda made, _, seed, **more: made.reset(seed=seed, **more), _text, read_tuple, has_close, contexts
            )
        return cls(lambda made, *given, **more: made.reset(*given, **more), same, same, has_close, contexts)


@dataclass(frozen=True)
class StepFunction:
    """An environment of which every step is a call of one function."""

    function: Callable[..., Any]
    options: Mapping[str, Any]

    def step(self, text: str) -> Any:
        """Calls the function."""
        return self.function(text, **self.options)


def read_tuple(raw: Any) -> Observation:
    """Reads (text, info) of a gymnasium reset or (text, reward, terminated, truncated, info) of a step; numbers in
    `info["metrics"]` become fields. A text that is empty is no message.  Raises: TypeError."""
    if not isinstance(raw, tuple) or len(raw) not in (2, 5):
        raise TypeError(
            f"the environment returned {type(raw).__name__}; expected (observation, info) from reset, and "
            "(observation, reward, terminated, truncated, info) from step"
        )
    seen, info = raw[0], raw[-1]
    reward, terminated, truncated = raw[1:4] if len(raw) == 5 else (0.0, False, False)
    metrics = info.get("metrics", {}) if isinstance(info, Mapping) else {}
    return Observation(
        done=bool(terminated),
        truncated=bool(truncated) and not terminated,
        messages=_messages(seen),
        reward=reward,
        fields=metrics,
    )


def read_reply(raw: Any) -> Observation:
    """Reads what a step function returned: an Observation, a reply, None for the end, or (reply or None, reward)."""
    if isinstance(raw, Observation):
        return raw
    reply, reward = raw if isinstance(raw, tuple) and len(raw) == 2 else (raw, 0.0)
    if reply is not None and not isinstance(reply, str):
        raise TypeError(
            f"the step function returned {type(raw).__name__}; expected a reply as text, None for the end of the "
            "episode, (reply or None, reward), or an Observation"
        )
    return Observation(done=reply is None, messages=_messages(reply), reward=reward)


def _messages(text: Any) -> tuple[Message, ...]:
    return () if text is None or (isinstance(text, str) and not text) else (Message("user", str(text)),)


def same(value: Any) -> Any:
    """Returns the value."""
    return value


def _parameters(method: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return {} if method is None else inspect.signature(method).parameters
    except (TypeError, ValueError):  # a method written in C
        return {}


def _is_gymnasium(reset: Callable[..., Any]) -> bool:
    """Tells whether `reset(seed=0)` is a possible call, and nothing stands where the long form has its prompt."""
    try:
        signature = inspect.signature(reset)
        signature.bind(seed=0)
    except (TypeError, ValueError):
        return False
    before = itertools.takewhile(lambda each: each.name != "seed", signature.parameters.values())
    return {each.name for each in before if each.kind is each.POSITIONAL_OR_KEYWORD} <= {"options"}


async def awaited(result: Any) -> Any:
    """The result of a method that may be async."""
    if not isinstance(result, Observation) and inspect.isawaitable(result):  # the second test is the slow one
        awaitable: Awaitable[Any] = result
        return await awaitable
    return result
