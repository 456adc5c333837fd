# SPDX-License-Identifier: Apache-2.0
"""The config of environments and of the limits of their episodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import PositiveFloat, PositiveInt

from whet.config.section import Choice, Section, SectionPlace, Values, entry_at, key
from whet.config.sources import missing_file
from whet.errors import ConfigError
from whet.manifests import absent, missing_plugin
from whet.registry import ENVIRONMENTS, TOOL_PARSERS, TOOLS

ENTRIES = (
    "tools: a shipped name, path/file.py:function (or class), {python: ..., options: {...}}, "
    "{mcp: {command: [...]}}, {mcp: {url: http://..., headers: {...}}}, {mcp: {python: path/file.py:server}}"
)
ROLE = "role of results: tool, or user if the chat template has no tools; the system message then describes the tools"


@dataclass(frozen=True)
class ToolLimits:
    """Limits of tools. A call that is late or over the limit returns an error. A longer result is cut."""

    seconds: float = 30.0  # of one call
    start_seconds: float = 60.0  # for starting all sessions of an episode together
    calls: float = 32  # of an episode
    characters: float = 8000  # of one result


LIMITS = (
    f"limits of tools: seconds of a call ({ToolLimits.seconds:g}), start_seconds for starting an episode's sessions "
    f"({ToolLimits.start_seconds:g}), calls per episode ({ToolLimits.calls:g}), characters of a result "
    f"({ToolLimits.characters:g})"
)


class ToolsConfig(Section):
    """The tools that the model can call in an environment."""

    tools: list[str | Values] = key([], ENTRIES)
    tool_parser: Annotated[str | None, Choice(TOOL_PARSERS)] = key(
        None, "format of tool calls, or path/file.py:function; unset: the format of the chat template"
    )
    tool_role: Literal["tool", "user"] = key("tool", ROLE)
    tool_limits: dict[str, PositiveFloat] = key({}, LIMITS)


def tool_rule(section: ToolsConfig, at: SectionPlace) -> Iterator[ConfigError]:
    """Checks the entries of `tools` and the limits of tools, without running user code."""
    known = [each.name for each in dataclasses.fields(ToolLimits)]
    if unknown := sorted({*section.tool_limits} - {*known}):
        yield ConfigError(at.of("tool_limits"), unknown[0], f"one of {', '.join(known)}", "correct the name")
        return
    if not section.tools:
        given = [name for name in ("tool_parser", "tool_limits") if section[name]]
        if given:
            change = f"set {at.of('tools')}, or unset it"
            yield ConfigError(at.of(given[0]), section[given[0]], f"no value, as {at.of('tools')} is empty", change)
        return
    if plugin := missing_plugin("key", "environment.tools"):
        yield ConfigError.joined([absent(at.of("tools"), plugin)])
        return
    limits = ToolLimits(**section.tool_limits)
    for name, most in (("seconds", "step_seconds"), ("start_seconds", "reset_seconds")):
        if getattr(limits, name) >= section[most]:
            expected = f"less than {at.of(most)}={section[most]:g}, which would fail the episode first"
            key, change = f"{at.of('tool_limits')}.{name}", f"lower it, or raise {at.of(most)}"
            yield ConfigError(key, getattr(limits, name), expected, change)
    for number, entry in enumerate(section.tools):
        where = f"{at.of('tools')}[{number}]"
        try:
            kind, value, options = read_entry(entry, where)
            if kind == "python" and ":" not in value:
                entry_at(TOOLS, where, value).resolve_options(options, f"{where}.options")
            elif kind == "python":
                location = value.rpartition(":")[0]
                if location.endswith(".py") and not Path(location).expanduser().is_file():
                    yield missing_file(where, location)
        except ConfigError as error:
            yield error


def read_entry(entry: Any, where: str) -> tuple[str, Any, Mapping[str, Any]]:
    """Splits an entry into kind (python or mcp), value and options.  Raises: ConfigError for another form."""
    if isinstance(entry, str):
        entry = {"python": entry}
    kinds = [kind for kind in ("python", "mcp") if kind in entry]
    if len(kinds) != 1 or {*entry} - {"options", *kinds} or ("options" in entry and kinds == ["mcp"]):
        forms = "a name, {python: path/file.py:function, options: {...}}, or {mcp: {command: [...]}}"
        raise ConfigError(where, dict(entry), forms, "correct the entry")
    value = entry[kinds[0]]
    if not isinstance(value, str if kinds == ["python"] else Mapping):
        expected = "text" if kinds == ["python"] else "a mapping with command, url or python"
        raise ConfigError(f"{where}.{kinds[0]}", value, expected, "correct it")
    return kinds[0], value, entry.get("options") or {}


OnLimit = Literal["fail", "truncate"]


class StageConfig(ToolsConfig):
    """An environment (of the run or of a sub-agent), its tools, and the limits of its episodes."""

    name: Annotated[str, Choice(ENVIRONMENTS, "options")] = key(
        "single_turn", "registered environment, or path/file.py:function"
    )
    options: Values = key({}, "options of the environment")
    max_turns: PositiveInt = key(8, "most turns of an episode")
    max_turn_tokens: PositiveInt | None = key(None, "most tokens of a turn; unset: the tokens left for the response")
    max_episode_tokens: PositiveInt | None = key(
        None, "most tokens that the model writes in an episode; unset: no limit"
    )
    max_episodes: PositiveInt | None = key(
        None, "most episodes at a time, later ones wait; unset: 256 if each has its own process, else no limit"
    )
    reset_seconds: PositiveFloat = key(120.0, "deadline of the environment's reset, in seconds")
    step_seconds: PositiveFloat = key(60.0, "deadline of one step of the environment, in seconds")
    episode_seconds: PositiveFloat = key(3600.0, "deadline of an episode, in seconds")

    @property
    def is_silent(self) -> bool:
        """Tells whether the environment needs no host. It never replies; each episode ends after its first turn."""
        return not self.tools and self.max_episodes is None and bool(ENVIRONMENTS[self.name].marks.get("silent"))


class EnvironmentConfig(StageConfig):
    """The environment of the run, which gives observations between the turns of the model, and its sub-agents."""

    agents: dict[str, StageConfig] = key({}, "environments of sub-agents, by name; a task names its sub-agent")
    on_timeout: OnLimit = key("fail", "an episode past a deadline: fail, or truncate it to the turns that it has")
    on_overflow: OnLimit = key("truncate", "an observation too long for the context: fail, or truncate the episode")

    @property
    def label(self) -> str:
        """The name of the environment in metrics: its registered name, or the name of its class."""
        return ENVIRONMENTS[self.name].name.rpartition(":")[2]
