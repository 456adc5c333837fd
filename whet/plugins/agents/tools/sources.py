# SPDX-License-Identifier: Apache-2.0
"""The entries of `environment.tools`: functions, classes with a session for each episode, and MCP servers. Also makes
the schema of a tool from a function's signature and docstring, and checks arguments."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from whet.config.environment import read_entry
from whet.data.media import image
from whet.errors import ConfigError, describe
from whet.processes.background import Background
from whet.registry import TOOLS
from whet.types import Media, Prompt

Part = str | Media  # of the result of a call


class BadCallError(Exception):
    """A faulty tool call. The model reads its message as the result of the call."""


class Session(ABC):
    """The tools of one entry of `environment.tools` during one episode."""

    async def start(self) -> None:  # noqa: B027 - most have nothing to start
        """Opens the session's resources.  Raises: ToolError."""

    shown: Callable[[Sequence[Media]], Any] | None = None  # gets all media so far, before a turn's calls

    @abstractmethod
    async def call(self, name: str, arguments: Mapping[str, Any]) -> Sequence[Part]:
        """Runs a tool and returns the parts of its result.  Raises: BadCallError; ToolError if the session is lost;
        errors of the tool."""

    async def close(self) -> None:  # noqa: B027
        """Closes the session's resources."""


class ToolSource(ABC):
    """An entry of `environment.tools`."""

    schemas: Sequence[ToolSchema]  # of its tools

    @abstractmethod
    def session(self, prompt: Prompt) -> Session:
        """Makes the session for the episode of a prompt."""


def open_source(entry: Any, where: str, seconds: float, known: Sequence[ToolSchema] | None = None) -> ToolSource:
    """Opens an entry as a source of tools. An MCP server lists its tools within `seconds`, unless they are `known`.

    Raises: ConfigError, ToolError."""
    kind, value, options = read_entry(entry, where)
    if kind == "mcp":
        from whet.plugins.agents.tools.mcp import McpSource

        return McpSource(value, where, seconds, known)
    try:
        found = TOOLS[value]
        target = found.load()
    except Exception as error:  # importing the file runs code of the user
        raise ConfigError(f"{where}: tool {value}", describe(error), "code that loads", "correct it") from error
    resolved = found.resolve_options(options, f"{where}.options")
    return ClassSource(target, resolved, where) if inspect.isclass(target) else FunctionSource(target, resolved, where)


class FunctionSource(ToolSource):
    """A tool that is a function. The model supplies parameters before `*`; the config supplies options after it."""

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any], where: str) -> None:
        schema, model = schema_of(function, function.__name__, where)
        self.schemas, self._tool = [schema], {schema.name: (partial(function, **options), model)}

    def session(self, prompt: Prompt) -> Session:
        return PythonSession(self._tool)


class ClassSource(ToolSource):
    """A class as a source of tools, with one object for each episode. Its public methods are tools, except two: `close`
    ends the object, and `shown` gets the media that the model has read, before the calls of a turn run. The constructor
    may take `prompt`; its other parameters are options of the config. A class method `prepare` gets the options, once
    before processes of episodes are forked."""

    def __init__(self, kind: type, options: Mapping[str, Any], where: str) -> None:
        self._kind, self._options = kind, options
        prepare = getattr(kind, "prepare", None)
        methods = inspect.getmembers(kind, inspect.isfunction)
        names = [name for name, _ in methods if not name.startswith("_") and name not in ("close", "shown")]
        if not names:
            raise ConfigError(f"{where}: class {kind.__name__}", "no public method", "one for each tool", "write one")
        if inspect.ismethod(prepare):
            try:
                prepare(**options)
            except Exception as error:  # code of the user
                place = f"{where}: {kind.__name__}.prepare"
                if isinstance(error, ConfigError):
                    raise error.at(place) from error
                raise ConfigError(place, describe(error), "code that raises nothing", "correct it") from error
        found = {name: schema_of(inspect.getattr_static(kind, name), name, where) for name in names}
        self.schemas = [schema for schema, _ in found.values()]
        self._models = {name: model for name, (_, model) in found.items()}

    def session(self, prompt: Prompt) -> Session:
        takes_prompt = "prompt" in inspect.signature(self._kind).parameters
        made = self._kind(prompt, **self._options) if takes_prompt else self._kind(**self._options)
        own = {name: (getattr(made, name), model) for name, model in self._models.items()}
        return PythonSession(own, getattr(made, "close", None), getattr(made, "shown", None))


class PythonSession(Session):
    """Runs functions as tools. It awaits `async` functions, and runs others in threads of their own."""

    def __init__(
        self,
        tools: Mapping[str, tuple[Callable[..., Any], type[BaseModel]]],
        close: Callable[[], Any] | None = None,
        shown: Callable[[Sequence[Media]], Any] | None = None,
    ) -> None:
        self._tools, self._close, self.shown = tools, close, shown

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Sequence[Part]:
        function, model = self._tools[name]
        try:
            given = checked(model, arguments)
        except ValueError as error:
            raise BadCallError(str(error)) from error
        result = await _run(lambda: function(**given), is_async=inspect.iscoroutinefunction(inspect.unwrap(function)))
        is_mixed = isinstance(result, list | tuple) and any(isinstance(each, Media | Image.Image) for each in result)
        return [_part(each) for each in (result if is_mixed else [result])]

    async def close(self) -> None:
        if self._close is not None:
            await _run(self._close, is_async=inspect.iscoroutinefunction(self._close))


async def _run(call: Callable[[], Any], *, is_async: bool) -> Any:
    """Runs a call without blocking other calls or the deadline, and returns its result. A hanging thread is not
    stopped: it ends with the process of the episode."""
    if is_async:
        return await call()

    def with_place() -> Any:
        try:
            return call()
        except SystemExit as error:  # becomes an error with its place, which the model reads
            raise RuntimeError(describe(error)) from error

    thread = Background("whet-tool")
    done = thread.submit(with_place)
    thread.close()
    result = await asyncio.wrap_future(done)
    return await result if inspect.isawaitable(result) else result


def _part(result: Any) -> Part:
    """Converts a result: text, images and videos stay as they are; other values become JSON."""
    if isinstance(result, str | Media):
        return result
    if isinstance(result, Image.Image):
        return image(result)
    return "" if result is None else json.dumps(result, ensure_ascii=False, default=str)


# A line of a docstring that begins a section, in Google's style.
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns?|Yields|Raises|Examples?|Notes?):\s*$", re.MULTILINE)
_ARGUMENT = re.compile(r"^(\s+)\*{0,2}(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")


@dataclass(frozen=True)
class ToolSchema:
    """A tool as the model reads it: its name, its purpose, and the JSON schema of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Returns the tool in the form of OpenAI's API, which chat templates take."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def schema_of(function: Callable[..., Any], name: str, where: str) -> tuple[ToolSchema, type[BaseModel]]:
    """Returns the schema of a function, and a pydantic model that checks arguments. Parameters after `*` are options of
    the config, which the language model does not see.

    Raises: ConfigError, with `where` in its key, for a missing docstring, a parameter without a type, or *args."""
    doc, place = inspect.getdoc(function), f"{where}: tool {name}"
    if not doc:
        raise ConfigError(place, "no docstring", "one from which the model reads its use", "write one")
    summary, described = read_docstring(doc)
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception as error:  # annotations are code of the user
        raise ConfigError(place, str(error), "types that can be read", "correct the annotations") from error
    fields: dict[str, Any] = {}
    for each in inspect.signature(function).parameters.values():
        if each.name == "self" or each.kind is each.KEYWORD_ONLY:
            continue
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD, each.POSITIONAL_ONLY):
            found = f"the parameter {each}, which has no schema"
            raise ConfigError(place, found, "named parameters with types", "replace it")
        if each.name not in hints:
            raise ConfigError(f"{place}: {each.name}", "no type", f"one such as {each.name}: str", "annotate it")
        default = ... if each.default is each.empty else each.default
        # The alias lets a parameter have a name that pydantic keeps for itself.
        named = Field(default, alias=each.name, description=described.get(each.name))
        fields[f"p_{each.name}"] = (hints[each.name], named)
    try:
        strict = ConfigDict(extra="forbid", allow_inf_nan=False)
        model: type[BaseModel] = create_model(name, __config__=strict, **fields)
        parameters = _without_titles(model.model_json_schema())
        parameters.pop("additionalProperties", None)  # the check of arguments reports extra ones
    except Exception as error:  # pydantic's errors of unsupported types have several classes
        found = f"a parameter has a type without a JSON schema ({str(error).splitlines()[0]})"
        raise ConfigError(place, found, "str, int, float, bool, list, dict, Literal or a pydantic model") from error
    return ToolSchema(name, summary, {"type": "object", **parameters}), model


def checked(model: type[BaseModel], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Checks arguments, and converts them for the function.  Raises: ValueError that lists every fault to the model."""
    try:
        found = model.model_validate(dict(arguments))
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_url=False)]
        raise ValueError("wrong arguments: " + "; ".join(faults)) from error
    return {name.removeprefix("p_"): getattr(found, name) for name in found.model_fields_set}


def read_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """Returns a docstring's text before its first section, and the meaning of each argument in `Args:`."""
    first = _SECTION.search(doc)
    summary = doc[: first.start()] if first else doc
    described, current, indent = dict[str, str](), "", 0
    is_inside = False
    for line in doc.splitlines():
        if section := _SECTION.match(line):
            is_inside = section[1] in ("Args", "Arguments", "Parameters")
            continue
        found = _ARGUMENT.match(line) if is_inside else None
        if found is not None and (not current or len(found[1]) <= indent):
            current, indent = found[2], len(found[1])
            described[current] = found[3].strip()
        elif is_inside and current and line.strip():
            described[current] = f"{described[current]} {line.strip()}".strip()
    return " ".join(summary.split()), described


def _without_titles(schema: Any) -> Any:
    """Removes the titles that pydantic adds to a JSON schema, since they do not help a model."""
    if isinstance(schema, list):
        return [_without_titles(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _without_titles(each) for name, each in value.items()}
        if key == "properties"
        else _without_titles(value)
        for key, value in schema.items()
        if key != "title" or not isinstance(value, str)
    }
