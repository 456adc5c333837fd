# SPDX-License-Identifier: Apache-2.0
"""The protocol of environments. An object is one episode: `reset` gets the prompt, each `step` gets the model's turn.

    class Guess:                                              class Guess:
        def __init__(self, *, limit=100): ...                     def __init__(self, prompt, *, limit=100): ...
        async def reset(self, prompt, seed) -> Observation: ...
        async def step(self, answer) -> Observation: ...          def step(self, answer: str) -> Observation: ...
        async def close(self): ...

On the right is the short form: the constructor gets the prompt, and `step` gets the text of the turn without special
tokens. Methods of either form may be `async`. Options are keyword-only.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, runtime_checkable

from whet.types import FinishReason, Media, Message, Prompt


@dataclass(frozen=True)
class Answer:
    """A turn of the model, the argument of `step`."""

    text: str  # special tokens removed
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason = "stop"


@dataclass(frozen=True)
class Observation:
    """The reply of an environment: messages for the model to read, or the end of the episode."""

    done: bool
    messages: tuple[Message, ...] = ()
    reward: float = 0.0  # of the turn just received; the score of the reward function is added to the episode's sum
    fields: Mapping[str, Any] = field(default_factory=dict)  # stored in the trajectory: columns by name
    truncated: bool = False  # a limit of the environment ended the episode, not the task
    media: tuple[Media, ...] = ()  # in the order of their placeholders in the messages
    context: Literal["append", "replace"] = "append"  # "replace": the messages replace the whole conversation so far
    state_key: str | None = None  # equal for equal states, for estimators that compare steps
    max_tokens: int | None = None  # of the next turn


class Environment(Protocol):
    """An environment of either form. An exception or an invalid observation fails only its own episode."""

    def step(self, answer: Any) -> Any:
        """Gets an `Answer`, in the short form only its text.  Returns an Observation; may be async."""
        ...


@runtime_checkable
class Resets(Protocol):
    """The long form of an environment."""

    def reset(self, prompt: Prompt, seed: int) -> Any:
        """Begins the episode.  Returns the first Observation. The episodes of a prompt get the same seed."""
        ...


@runtime_checkable
class Closes(Protocol):
    """An environment with resources to release."""

    def close(self) -> Any:
        """Releases them. Called exactly once, also after a failure, unless the process itself has died."""
        ...


def read_observation(raw: object) -> Observation:
    """Checks an observation and converts its values to plain types.  Raises: TypeError, ValueError."""
    if not isinstance(raw, Observation):
        raise TypeError(f"the environment returned {_show(raw)}; expected an Observation")
    if not isinstance(raw.messages, tuple | list):
        raise TypeError(f"Observation.messages is {_show(raw.messages)}; expected a tuple of Message")
    for index, message in enumerate(raw.messages):
        if not isinstance(message, Message) or not isinstance(message.role, str):
            raise TypeError(f"Observation.messages[{index}] is {_show(message)}; expected a Message with a role")
        if not isinstance(message.content, str | list):
            raise TypeError(
                f"Observation.messages[{index}].content is {_show(message.content)}; expected text or a list"
            )
    if not isinstance(raw.media, tuple | list) or not all(isinstance(each, Media) for each in raw.media):
        raise TypeError(f"Observation.media is {_show(raw.media)}; expected a tuple of Media")
    if not isinstance(raw.fields, Mapping) or not all(isinstance(name, str) for name in raw.fields):
        raise TypeError(f"Observation.fields is {_show(raw.fields)}; expected a dict with names as keys")
    if raw.context not in ("append", "replace"):
        raise ValueError(f"Observation.context is {_show(raw.context)}; expected append or replace")
    if raw.max_tokens is not None and (not isinstance(raw.max_tokens, int) or raw.max_tokens < 1):
        raise ValueError(f"Observation.max_tokens is {_show(raw.max_tokens)}; expected a whole number above 0, or None")
    is_plain = type(raw.done) is type(raw.truncated) is bool and type(raw.messages) is type(raw.media) is tuple
    if is_plain and type(raw.reward) is float and math.isfinite(raw.reward):
        return raw
    return replace(
        raw,
        done=bool(_number("done", raw.done)),
        truncated=bool(_number("truncated", raw.truncated)),
        reward=_number("reward", raw.reward),
        messages=tuple(raw.messages),
        media=tuple(raw.media),
    )


def _number(name: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"Observation.{name} is {_show(value)}; expected a finite number")
    return number


def _show(value: object) -> str:
    return f"{reprlib.repr(value)} ({type(value).__name__})"
