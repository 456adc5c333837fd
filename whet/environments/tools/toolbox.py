# SPDX-License-Identifier: Apache-2.0
"""The tools of a run: schemas for the chat template, the parser of calls, and the limits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from whet.config.tools import ToolLimits
from whet.data.chat import DESCRIBED
from whet.environments.running import EnvironmentSpec
from whet.environments.tools.environment import Role, ToolSpec
from whet.environments.tools.parsers import parse, parser_of
from whet.environments.tools.schema import ToolSchema
from whet.environments.tools.sources import open_source
from whet.errors import ConfigError, ToolError, describe
from whet.registry import TOOL_PARSERS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from whet.config.schema import DataConfig
    from whet.config.tools import ToolsConfig

FORM = 'A call looks like this:\n<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'


@dataclass(frozen=True)
class Toolbox:
    """The tools of a run."""

    entries: Sequence[Any]
    known: Sequence[Sequence[ToolSchema]]  # of each entry
    limits: ToolLimits = field(default_factory=ToolLimits)
    parser: str | None = None  # None: that of the chat template
    role: Role = "tool"

    @property
    def schemas(self) -> list[ToolSchema]:
        """The schemas of all tools, in order."""
        return [schema for each in self.known for schema in each]

    def around(self, inner: EnvironmentSpec) -> ToolSpec:
        """The tools around an environment."""
        return ToolSpec(inner, self.entries, self.known, self.limits, self.role)

    @property
    def for_template(self) -> dict[str, Any]:
        """The arguments of the chat template that tell the model its tools."""
        tools = [schema.to_dict() for schema in self.schemas]
        return {"tools": tools} if self.role == "tool" else {DESCRIBED: described(tools)}

    def calls(
        self, tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], turn: int
    ) -> tuple[dict[str, Any], ...]:
        """The calls in a turn, the `turn`-th of its episode. The parser sees the special tokens that some formats have.

        An id has nine letters and digits, as Mistral's template wants it.

        Raises: ToolError where the parser raises."""
        assert self.parser is not None
        return self.typed_calls(str(tokenizer.decode(list(token_ids), skip_special_tokens=False)), turn)

    def typed_calls(self, text: str, turn: int = 0) -> tuple[dict[str, Any], ...]:
        """The calls in a text, by default in the form of Hermes.  Raises: as `calls`."""
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


def with_tools(data: DataConfig, environment: ToolsConfig) -> DataConfig:
    """The data section with the run's tools among the arguments of the chat template.  Raises: as `toolbox_of`."""
    tools = toolbox_of(environment)
    if tools is None:
        return data
    return data.model_copy(update={"chat_template_kwargs": {**data.chat_template_kwargs, **tools.for_template}})


def toolbox_of(environment: ToolsConfig) -> Toolbox | None:
    """The tools of the config; None without any. A process loads them, and asks MCP servers for their tools, once.

    Raises: ConfigError; ToolError for an MCP server that does not start."""
    if not environment.tools:
        return None
    limits = ToolLimits(**environment.tool_limits)
    opened = _open(json.dumps(environment.tools, sort_keys=True, default=str), limits.start_seconds)
    return Toolbox(environment.tools, opened, limits, environment.tool_parser, environment.tool_role)


def with_parser(tools: Toolbox, template: str | None) -> Toolbox:
    """The tools with the parser of a chat template; None stands for text without a template.

    Raises: ConfigError where the template shows no known format, or no tools at all."""
    if template is not None and tools.role == "tool" and "tools" not in template:
        change = (
            "set environment.tool_role=user, which tells them in the system message and sends results as user "
            "messages, or set data.chat_template_kwargs.chat_template"
        )
        raise ConfigError("chat template", "does not show tools to the model", "one that reads tools", change)
    parser = tools.parser or ("hermes" if tools.role == "user" else parser_of(template or ""))
    if parser is None:
        expected = f"{', '.join(TOOL_PARSERS.names())}, or your own as path/file.py:function"
        change = "set it, since the chat template shows no known format of calls"
        raise ConfigError("environment.tool_parser", None, expected, change)
    return replace(tools, parser=parser)


def described(tools: Sequence[Mapping[str, Any]]) -> str:
    """The text of a system message that tells a model its tools."""
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
