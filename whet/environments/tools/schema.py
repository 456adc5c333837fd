# SPDX-License-Identifier: Apache-2.0
"""The schema of a tool: from the signature and the docstring of a function, and the check of arguments against it."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from whet.errors import ConfigError

# A line of a docstring that begins a section, in Google's style.
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns?|Yields|Raises|Examples?|Notes?):\s*$", re.MULTILINE)
_ARGUMENT = re.compile(r"^(\s+)\*{0,2}(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")


@dataclass(frozen=True)
class ToolSchema:
    """The name of a tool, its purpose, and the JSON schema of its arguments, as the model reads them."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The tool in the form of OpenAI's API, which chat templates take."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def schema_of(function: Callable[..., Any], name: str, where: str) -> tuple[ToolSchema, type[BaseModel]]:
    """The schema of a function, and a model that checks its arguments. Parameters after `*` are options of the config,
    which the model does not see.

    Raises: ConfigError, beginning with `where`, without a docstring, for a parameter without a type, and for *args."""
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
        parameters.pop("additionalProperties", None)  # the check says so, where a model gives more
    except Exception as error:  # pydantic's errors of unsupported types have several classes
        found = f"a parameter has a type without a JSON schema ({str(error).splitlines()[0]})"
        raise ConfigError(place, found, "str, int, float, bool, list, dict, Literal or a pydantic model") from error
    return ToolSchema(name, summary, {"type": "object", **parameters}), model


def checked(model: type[BaseModel], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as the function takes them.  Raises: ValueError with every fault, for the model to read."""
    try:
        found = model.model_validate(dict(arguments))
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_url=False)]
        raise ValueError("wrong arguments: " + "; ".join(faults)) from error
    return {name.removeprefix("p_"): getattr(found, name) for name in found.model_fields_set}


def read_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """The text before the first section of a docstring, and the meaning of each argument in `Args:`."""
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
    """A JSON schema without the titles that pydantic adds, which tell a model nothing."""
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
