# SPDX-License-Identifier: Apache-2.0
"""The protocol of environments. An object is one episode: `reset` gets the prompt, each `step` gets the model's turn.

    class Guess:                                              class Guess:
        def __init__(self, *, limit=100): ...                     def __init__(self, prompt, *, limit=100): ...
        async def reset(self, prompt, seed) -> Observation: ...
        async def step(self, answer) -> Observation: ...          def step(self, answer: str) -> Observation: ...
        async def close(self): ...

The right column is the short form: the constructor gets the prompt, and `step` gets the text of the turn without
special tokens. Methods of either form may be `async`. Options are keyword-only. `whet.environments.running` has other
forms."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, runtime_checkable

from whet.errors import EnvError, TextError
from whet.registry import register_environment
from whet.types import FinishReason, Media, Message, Prompt


@dataclass(frozen=True)
class Answer:
    """A turn of the model; the argument of `step`."""

    text: str  # special tokens removed
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason = "stop"
    results: tuple[Result, ...] = ()  # of the tasks in the last observation; then there is no text
    media: tuple[Media, ...] = ()  # that the model has read before this turn, in order


@dataclass(frozen=True)
class Task:
    """A task for a sub-agent: the first messages of an episode, which runs in the sub-agent's own environment."""

    agent: str  # a name in `environment.agents`
    messages: tuple[Message, ...]
    ground_truth: Any = None
    extra_info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """The result of a task of a sub-agent."""

    text: str  # of its last turn
    reward: float  # the sum of its environment's rewards
    num_turns: int
    fields: Mapping[str, Any] = field(default_factory=dict)  # of its environment
    failure: str | None = None


@dataclass(frozen=True)
class Observation:
    """The reply of an environment: messages for the model to read, tasks for sub-agents, or the end of the episode."""

    done: bool
    messages: tuple[Message, ...] = ()
    reward: float = 0.0  # of the turn just received; the score of the reward function is added to the episode's sum
    fields: Mapping[str, Any] = field(default_factory=dict)  # stored in the trajectory: columns by name
    truncated: bool = False  # a limit of the environment ended the episode, not the task
    media: tuple[Media, ...] = ()  # in the order of their placeholders in the messages
    context: Literal["append", "replace"] = "append"  # "replace": the messages replace the whole conversation so far
    state_key: str | None = None  # equal for equal states, for estimators that compare steps
    max_tokens: int | None = None  # limit of the next turn
    player: str = ""  # the player of the next turn, who reads the messages; each player has its own conversation
    rewards: Mapping[str, float] = field(default_factory=dict)  # rewards by player, each for the player's last turn
    is_trained: bool = True  # False: the next turn is sampled, and not trained on
    tasks: tuple[Task, ...] = ()  # tasks to run now, concurrently; the next `step` gets their results


GOES_ON, ENDS = Observation(done=False), Observation(done=True)  # with nothing to read: objects that need no check


class Environment(Protocol):
    """An environment of either form. An exception or an invalid observation fails only its own episode."""

    def step(self, answer: Any) -> Any:
        """Takes an `Answer`; in the short form only its text.  Returns an Observation. May be async."""
        ...


@runtime_checkable
class Resets(Protocol):
    """The long form of an environment."""

    def reset(self, prompt: Prompt, seed: int) -> Any:
        """Starts the episode.  Returns the first Observation. All episodes of a prompt get the same seed."""
        ...


@runtime_checkable
class Closes(Protocol):
    """An environment with resources to release."""

    def close(self) -> Any:
        """Releases the resources. Called exactly once, also after a failure, unless the process has died."""
        ...


@register_environment("single_turn", pure=True, max_turns=1, silent=True)
class SingleTurn:
    """An environment whose episode ends after the first turn. It is `silent`: it returns no text and needs no host."""

    def __init__(self, prompt: Prompt) -> None:
        pass

    def step(self, answer: str) -> Observation:
        """Returns an observation that ends the episode, for any answer."""
        return ENDS


def _are(values: object, kind: type) -> bool:
    return isinstance(values, tuple | list) and all(isinstance(each, kind) for each in values)


def read_observation(raw: object) -> Observation:
    """Checks an observation and converts its values to plain types.  Raises: EnvError."""
    if not isinstance(raw, Observation):
        raise EnvError("Observation", f"the environment returned {_show(raw)}", "an Observation")
    for name, kind, each in (("messages", object, "Message"), ("media", Media, "Media"), ("tasks", Task, "Task")):
        if not _are(getattr(raw, name), kind):
            raise _wrong(name, getattr(raw, name), f"a tuple of {each}")
    for index, message in enumerate(raw.messages):
        if not isinstance(message, Message) or not isinstance(message.role, str):
            raise _wrong(f"messages[{index}]", message, "a Message with a role")
        if not message.is_text and (isinstance(message.content, tuple) or not _are(message.content, dict)):
            raise _wrong(f"messages[{index}].content", message.content, "text or a list of parts (dicts)")
        _check_names(f"messages[{index}].fields", message.fields)
    _check_names("fields", raw.fields)
    if raw.context not in ("append", "replace"):
        raise _wrong("context", raw.context, "append or replace")
    if raw.state_key is not None and not isinstance(raw.state_key, str):
        raise _wrong("state_key", raw.state_key, "text or None")
    if raw.max_tokens is not None and not (type(raw.max_tokens) is int and raw.max_tokens > 0):
        raise _wrong("max_tokens", raw.max_tokens, "a whole number above 0, or None")
    if not isinstance(raw.player, str):
        raise _wrong("player", raw.player, "text")
    _check_names("rewards", raw.rewards)
    if raw.tasks and (raw.messages or raw.done or raw.truncated):
        raise _wrong("tasks", raw.tasks, "no tasks together with messages, done or truncated")
    is_plain = type(raw.done) is type(raw.truncated) is type(raw.is_trained) is bool and not raw.rewards
    is_plain = is_plain and type(raw.messages) is type(raw.media) is type(raw.tasks) is tuple
    if is_plain and type(raw.reward) is float and math.isfinite(raw.reward):
        return raw
    return replace(
        raw,
        done=_flag("done", raw.done),
        truncated=_flag("truncated", raw.truncated),
        reward=_number("reward", raw.reward, "a finite number"),
        messages=tuple(raw.messages),
        media=tuple(raw.media),
        rewards={name: _number(f"rewards[{name!r}]", value, "a finite number") for name, value in raw.rewards.items()},
        is_trained=_flag("is_trained", raw.is_trained),
        tasks=tuple(raw.tasks),
    )


def unpaid(seen: Observation, moved: Sequence[str]) -> TextError | None:
    """Returns the error if `rewards` has a reward for an unknown player. `moved` has the player of each turn so far.

    Players who have moved or move next are known. Another name counts as a player who has not moved yet, if the
    observation also rewards all players who have moved, or after the first turn; but not if no player has a name."""
    known = [*dict.fromkeys(moved)] if seen.done or seen.truncated else [*dict.fromkeys((*moved, seen.player))]
    unknown = [name for name, reward in seen.rewards.items() if reward and name not in known]
    paid = {*seen.rewards, moved[-1]} if moved and seen.reward else {*seen.rewards}
    if not moved or not unknown or (any(known) and (len(moved) == 1 or {*moved} <= paid)):
        return None
    change = "correct the name; if the player has not moved yet, add rewards (0.0, too) for all players who have moved"
    return TextError("Observation.rewards", unknown[0], f"players: {', '.join(map(repr, known))}", change)


def _flag(name: str, value: Any) -> bool:
    number = _number(name, value, "True or False")
    if number not in (0.0, 1.0):
        raise _wrong(name, value, "True or False")
    return bool(number)


def _number(name: str, value: Any, expected: str) -> float:
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise _wrong(name, value, expected)
    return number


def _check_names(name: str, value: object) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise _wrong(name, value, "a dict with names as keys")


def _wrong(name: str, value: object, expected: str) -> EnvError:
    return EnvError(f"Observation.{name}", _show(value), expected)


def _show(value: object) -> str:
    return f"{reprlib.repr(value)} ({type(value).__name__})"
