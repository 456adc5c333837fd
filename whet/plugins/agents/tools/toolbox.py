# SPDX-License-Identifier: Apache-2.0
"""The tools of a run: schemas for the chat template, the parser of calls, the limits. `ToolEnvironment` wraps another
environment: it runs the calls of a turn, and passes turns without calls to the inner environment."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from whet.config.environment import ToolLimits
from whet.data.chat import DESCRIBED
from whet.environments.calls import parser_of
from whet.environments.protocol import Answer, Environment, Observation
from whet.environments.running import EnvironmentSpec, FailedError, Running
from whet.errors import ConfigError, SandboxError, ToolError, describe
from whet.plugins.agents.tools.parsers import parse
from whet.plugins.agents.tools.sources import BadCallError, Part, Session, ToolSchema, ToolSource, open_source
from whet.registry import TOOL_PARSERS, register_part
from whet.types import Failure, Media, Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from whet.config.environment import ToolsConfig

COUNTS = ("calls", "errors", "malformed", "late", "cut")  # in the fields of a trajectory, as tools/calls, ...
Role = Literal["tool", "user"]
FORM = 'A call looks like this:\n<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'


@dataclass(frozen=True)
class Toolbox:
    """The tools of a run, with the parser of their calls and their limits."""

    entries: Sequence[Any]
    known: Sequence[Sequence[ToolSchema]]  # of each entry
    limits: ToolLimits = field(default_factory=ToolLimits)
    parser: str | None = None  # None: chosen by the chat template
    role: Role = "tool"

    @property
    def schemas(self) -> list[ToolSchema]:
        """The schemas of all tools, in order."""
        return [schema for each in self.known for schema in each]

    @property
    def starts_servers(self) -> bool:
        """Tells whether the sessions of an episode start programs, such as MCP servers."""
        return any("command" in each.get("mcp", ()) for each in self.entries if isinstance(each, Mapping))

    def around(self, inner: EnvironmentSpec) -> ToolSpec:
        """Returns a spec that wraps the environment `inner` in the tools."""
        return ToolSpec(inner, self)

    @property
    def for_template(self) -> dict[str, Any]:
        """Returns the chat template's arguments that describe the tools to the model."""
        tools = [schema.to_dict() for schema in self.schemas]
        return {"tools": tools} if self.role == "tool" else {DESCRIBED: described(tools)}

    def with_parser(self, template: str | None) -> Toolbox:
        """Returns the toolbox with the parser that fits a chat template; None is text without a template.

        Raises: ConfigError if the template shows no known format of calls, or does not show tools to the model."""
        if template is not None and self.role == "tool" and "tools" not in template:
            change = (
                "set environment.tool_role=user, which lists the tools in the system message and sends results as "
                "user messages, or set data.chat_template_kwargs.chat_template"
            )
            raise ConfigError("chat template", "does not show tools to the model", "one that reads tools", change)
        parser = self.parser or ("hermes" if self.role == "user" else parser_of(template or ""))
        if parser is None:
            expected = f"{', '.join(TOOL_PARSERS.names())}, or your own as path/file.py:function"
            change = "set it, since the chat template shows no known format of calls"
            raise ConfigError("environment.tool_parser", None, expected, change)
        return replace(self, parser=parser)

    def calls(
        self, tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], turn: int
    ) -> tuple[dict[str, Any], ...]:
        """Parses the calls in turn number `turn`. The parser also sees special tokens, which some formats contain.

        An id of a call has nine letters and digits, as Mistral's template requires.

        Raises: ToolError if the parser raises."""
        assert self.parser is not None
        return self.typed_calls(str(tokenizer.decode(list(token_ids), skip_special_tokens=False)), turn)

    def typed_calls(self, text: str, turn: int = 0) -> tuple[dict[str, Any], ...]:
        """Parses the calls in a text, by default in the format of Hermes.  Raises: the errors of `calls`."""
        try:
            parsed = parse(self.parser or "hermes", text, {each.name: each.parameters for each in self.schemas})
        except Exception as error:  # the code of a user's parser
            found, change = f"{self.parser} raised {describe(error)}", "let it yield a Call with an error"
            raise ToolError("environment.tool_parser", found, "texts and Calls", change) from error
        return tuple(
            {"id": f"t{turn % 10**4:04}c{place % 10**3:03}", "name": call.name, "arguments": dict(call.arguments)}
            | ({"error": call.error} if call.error else {})
            for place, call in enumerate(parsed.calls)
        )


@register_part("tools")
def toolbox_of(environment: ToolsConfig) -> Toolbox:
    """Loads the tools of the config. Each process does this once, and asks MCP servers for their tools.

    Raises: ConfigError; ToolError for an MCP server that does not start."""
    limits = ToolLimits(**environment.tool_limits)
    opened = _open(json.dumps(environment.tools, sort_keys=True, default=str), limits.start_seconds)
    return Toolbox(environment.tools, opened, limits, environment.tool_parser, environment.tool_role)


def described(tools: Sequence[Mapping[str, Any]]) -> str:
    """Returns a system message that describes the tools to a model."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return f"You can call these functions:\n<tools>\n{lines}\n</tools>\n{FORM}"


@lru_cache(maxsize=8)
def _open(entries: str, start_seconds: float) -> tuple[tuple[ToolSchema, ...], ...]:
    found, known = dict[str, str](), []
    for number, entry in enumerate(json.loads(entries)):
        where = f"environment.tools[{number}]"
        known.append(tuple(open_source(entry, where, start_seconds).schemas))
        for schema in known[-1]:
            if schema.name in found:
                both = f"a tool {schema.name}, which {found[schema.name]} has too"
                raise ConfigError(where, both, "different names", "rename or remove one of them")
            found[schema.name] = where
    return tuple(known)


@dataclass(frozen=True)
class ToolSpec:
    """Tools and the environment that they wrap, in picklable form."""

    inner: EnvironmentSpec
    tools: Toolbox

    def load(self) -> Callable[[Prompt], Environment]:
        """Returns a function that creates the environment of one episode.  Raises: the errors of `open_source`."""
        make, limits, role = self.inner.load(), self.tools.limits, self.tools.role
        entries = enumerate(zip(self.tools.entries, self.tools.known, strict=True))
        sources = [
            open_source(entry, f"environment.tools[{number}]", limits.start_seconds, known)
            for number, (entry, known) in entries
        ]

        def made(prompt: Prompt) -> ToolEnvironment:
            inside = make(prompt)
            inner = Running(lambda _: inside)
            inner.take(inside)  # to be closed also where a session does not start
            return ToolEnvironment(inner, sources, limits, role)

        return made


class ToolEnvironment:
    """An environment with tools around an inner environment, for one episode."""

    def __init__(self, inner: Running, sources: Sequence[ToolSource], limits: ToolLimits, role: Role = "tool") -> None:
        self._inner, self._sources, self._limits, self._role = inner, sources, limits, role
        self._sessions: list[Session] = []
        self._by_tool: dict[str, Session] = {}
        self._counts = Counter[str]()
        self._asked = Observation(done=False)  # the last one of the inner environment

    async def reset(self, prompt: Prompt, seed: int) -> Observation:
        """Starts the sessions of all tools, then resets the inner environment."""
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
        """Runs the calls of a turn concurrently. Passes a turn without calls to the inner environment."""
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
        """Ends the sessions and the inner environment."""
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
        """Adds the episode's call counts so far to the observation."""
        fields = {f"tools/{name}": float(self._counts[name]) for name in COUNTS}
        return replace(observation, fields={**fields, **observation.fields})

    async def _result(self, call: Mapping[str, Any]) -> Sequence[Part]:
        """Runs a call, and returns the parts of its result.  Raises: ToolError if the session is lost; SandboxError.
        Both fail the episode."""
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
    """Returns the content of a message: text, or a list of parts if there is an image or a video."""
    if all(isinstance(part, str) for part in parts):
        return "".join(map(str, parts))
    return [{"type": part.kind} if isinstance(part, Media) else {"type": "text", "text": part} for part in parts]
