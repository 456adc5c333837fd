# SPDX-License-Identifier: Apache-2.0
"""Tools around an environment: a turn with calls gets their results, another turn goes to the environment."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from whet.config.tools import ToolLimits
from whet.environments.protocol import Answer, Environment, Observation
from whet.environments.running import EnvironmentSpec, FailedError, Running
from whet.environments.tools.schema import ToolSchema
from whet.environments.tools.sources import BadCallError, Part, Session, ToolSource, open_source
from whet.errors import SandboxError, ToolError, describe
from whet.types import Failure, Media, Message, Prompt

COUNTS = ("calls", "errors", "malformed", "late", "cut")  # in the fields of a trajectory, as tools/calls, ...
Role = Literal["tool", "user"]


@dataclass(frozen=True)
class ToolSpec:
    """Tools and the environment that they wrap, as a process gets them."""

    inner: EnvironmentSpec
    entries: Sequence[Any]
    known: Sequence[Sequence[ToolSchema]]  # of each entry
    limits: ToolLimits
    role: Role

    def load(self) -> Callable[[Prompt], Environment]:
        """Returns a function that makes the environment of one episode. Raises: as `open_source`."""
        make, limits = self.inner.load(), self.limits
        sources = [
            open_source(entry, f"environment.tools[{number}]", limits.start_seconds, known)
            for number, (entry, known) in enumerate(zip(self.entries, self.known, strict=True))
        ]

        def made(prompt: Prompt) -> ToolEnvironment:
            inside = make(prompt)
            inner = Running(lambda _: inside)
            inner.take(inside)  # to be closed also where a session does not start
            return ToolEnvironment(inner, sources, limits, self.role)

        return made


class ToolEnvironment:
    """The environment of an episode with tools."""

    def __init__(self, inner: Running, sources: Sequence[ToolSource], limits: ToolLimits, role: Role = "tool") -> None:
        self._inner, self._sources, self._limits, self._role = inner, sources, limits, role
        self._sessions: list[Session] = []
        self._by_tool: dict[str, Session] = {}
        self._counts = Counter[str]()
        self._asked = Observation(done=False)  # the last one of the environment inside

    async def reset(self, prompt: Prompt, seed: int) -> Observation:
        """Starts the sessions, then the environment inside."""
        for source in self._sources:
            try:
                session = source.session(prompt)
            except Exception as error:  # the constructor of a user's class
                names = ", ".join(schema.name for schema in source.schemas)
                raise ToolError(f"session of {names}", describe(error), "a session for the prompt") from error
            self._sessions.append(session)
            self._by_tool |= dict.fromkeys((schema.name for schema in source.schemas), session)
        try:
            async with asyncio.timeout(self._limits.start_seconds):
                await asyncio.gather(*(session.start() for session in self._sessions))
        except TimeoutError as error:
            found = f"not started in {self._limits.start_seconds:g} s"
            change = "raise environment.tool_limits.start_seconds, or look at the server's own log"
            raise ToolError("sessions of the tools", found, change=change) from error
        return self._counted(await self._ask("reset", prompt, seed))

    async def step(self, answer: Answer) -> Observation:
        """Answers the calls of a turn, side by side; a turn without any goes to the environment inside."""
        if not answer.tool_calls:
            return self._counted(await self._ask("step", answer))
        for session in self._sessions if answer.media else ():
            if session.shown is not None:
                session.shown(answer.media)
        results = await asyncio.gather(*(self._result(call) for call in answer.tool_calls))
        media = tuple(part for parts in results for part in parts if isinstance(part, Media))
        told = self._messages(answer.tool_calls, results)
        nothing_else: dict[str, Any] = {"reward": 0.0, "rewards": {}, "fields": {}, "context": "append"}
        return self._counted(replace(self._asked, messages=told, media=media, **nothing_else))  # of the same turn

    async def close(self) -> None:
        """Ends the sessions and the environment inside."""
        ended = await asyncio.gather(*(each.close() for each in self._sessions), return_exceptions=True)
        await self._inner.call("close")
        if errors := [each for each in ended if isinstance(each, BaseException)]:
            raise ToolError("session of a tool", describe(errors[0]), "a close that raises nothing")

    async def _ask(self, verb: str, *arguments: Any) -> Observation:
        outcome = await self._inner.call(verb, *arguments)
        if isinstance(outcome, Failure):
            raise FailedError(outcome)
        self._asked = outcome
        return outcome

    def _counted(self, observation: Observation) -> Observation:
        """The observation with the counts of the episode so far."""
        fields = {f"tools/{name}": float(self._counts[name]) for name in COUNTS}
        return replace(observation, fields={**fields, **observation.fields})

    async def _result(self, call: Mapping[str, Any]) -> Sequence[Part]:
        """The parts that answer a call.  Raises: ToolError where the session is lost, SandboxError; both fail the
        episode."""
        limits = self._limits
        deadline = asyncio.timeout(limits.seconds)
        self._counts["calls"] += 1
        try:
            if call.get("error"):
                self._counts["malformed"] += 1
                raise BadCallError(call["error"])
            if self._counts["calls"] > limits.calls:
                raise BadCallError(f"no more calls: the limit is {limits.calls:g}; answer now")
            if call["name"] not in self._by_tool:
                raise BadCallError(f"there is no tool {call['name']!r}; the tools are {', '.join(self._by_tool)}")
            session = self._by_tool[call["name"]]
            async with deadline:
                parts = await session.call(call["name"], call["arguments"])
        except (ToolError, SandboxError):
            raise
        except BadCallError as error:
            return self._failed(str(error))
        except Exception as error:  # the code of the tool may raise anything, also a TimeoutError of its own
            if deadline.expired():
                self._counts["late"] += 1
                return self._failed(f"the call took longer than {limits.seconds:g} s")
            return self._failed(f"{type(error).__name__}: {error}")
        return [self._fitting(part) if isinstance(part, str) else part for part in parts]

    def _failed(self, message: str) -> Sequence[Part]:
        self._counts["errors"] += 1
        return [self._fitting(f"error: {message}")]

    def _fitting(self, text: str) -> str:
        text, most = text.encode("utf-8", "replace").decode(), self._limits.characters
        if len(text) <= most:
            return text
        self._counts["cut"] += 1
        cut = f"[cut: the result has {len(text)} characters, of which the first {most:g} are shown]"
        return f"{text[: int(most)]}\n{cut}"

    def _messages(self, calls: Sequence[Mapping[str, Any]], results: Sequence[Sequence[Part]]) -> tuple[Message, ...]:
        if self._role == "user":  # one message, since many templates want user and assistant in turns
            shown: list[Part] = []
            for parts in results:
                shown += ["\n<tool_response>\n" if shown else "<tool_response>\n", *parts, "\n</tool_response>"]
            return (Message("user", _content(shown)),)
        return tuple(
            Message("tool", _content(parts), {"tool_call_id": call["id"], "name": call["name"]})
            for call, parts in zip(calls, results, strict=True)
        )


def _content(parts: Sequence[Part]) -> str | list[dict[str, Any]]:
    """The content of a message: text, or a list of parts where one is an image or a video."""
    if all(isinstance(part, str) for part in parts):
        return "".join(map(str, parts))
    return [{"type": part.kind} if isinstance(part, Media) else {"type": "text", "text": part} for part in parts]
