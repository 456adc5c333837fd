# SPDX-License-Identifier: Apache-2.0
"""Writes a config as YAML, for the run folder and for `whet config`, and the JSON Schema of recipe files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import yaml

from whet.config.compose import shipped_recipes
from whet.config.section import Section, Values

ANNOTATIONS = ("description", "default", "examples")
INTERPOLATION = {"type": "string", "pattern": r"\$\{"}


def to_yaml(config: Section) -> str:
    """The whole config as YAML, which `load_config` reads back unchanged."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def keyed_lines(config: Section) -> list[tuple[str, str]]:
    """The lines of the config as YAML, each with the dotted key that it sets, "" for the name of a section."""
    return list(value_lines(config.model_dump(mode="json")))


def value_lines(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields the lines of nested values, each with the dotted key that it sets, "" for the name of a mapping."""
    indent = "  " * prefix.count(".")
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield f"{indent}{name}:", ""
            yield from value_lines(value, f"{key}.")
        else:
            yield f"{indent}{name}: {inline(value)}", key


def inline(value: object) -> str:
    """A value as YAML on one line; text with line breaks becomes a quoted string."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=float("inf"))
    text = text.removesuffix("...\n").rstrip("\n")
    return json.dumps(value, ensure_ascii=False) if "\n" in text else text


def json_schema(schema: type[Section]) -> Values:
    """The schema of the recipes of a command; `$defs` has the schemas of sections, for files of config groups.

    No key is required, since a recipe has only the keys that it changes. The schema also allows what the loader accepts
    beyond plain values: a `defaults` list, empty sections, a string for a list of one, `${...}` for any value. Draft 7,
    since editors support it."""
    whole = schema.model_json_schema()
    for section in (whole, *whole["$defs"].values()):
        section["properties"] = {key: _as_written(field) for key, field in section["properties"].items()}
    part = {"anyOf": [{"type": "string", "examples": shipped_recipes()}, {"type": "object"}]}
    whole["properties"]["defaults"] = {"description": "recipes that this one builds on, in order", "items": part}
    if "reward" in whole["properties"]:
        text = {"type": ["string", "null"]}
        whole["properties"]["custom_reward_function"] = {
            "description": "verl's key for reward.function",
            "type": ["object", "null"],
            "properties": {"path": text, "name": text},
            "additionalProperties": False,
        }
    return {"$schema": "http://json-schema.org/draft-07/schema#", **whole}


def _as_written(field: Values) -> Values:
    """The schema of a field with everything that a recipe may have there."""
    if "$ref" in field:
        return {"anyOf": [{"$ref": field["$ref"]}, {"type": "null"}]}
    annotations: Values = {key: field[key] for key in ANNOTATIONS if key in field}
    forms: list[Values] = []
    for form in field.get("anyOf", [field]):
        form = {key: value for key, value in form.items() if key not in ("title", *ANNOTATIONS)}
        if "prefixItems" in form:
            form["items"] = form.pop("prefixItems")[0]  # all items have the same type
        if form.get("type") == "string" and "enum" not in form:
            form["type"] = ["string", "number"]  # the loader reads a number as text
        forms.append(form)
        if form.get("type") == "array":
            items = form["items"].get("anyOf", [form["items"]])
            forms += [each for each in items if each.get("type") == "string"]
    return {**annotations, "anyOf": [*forms, INTERPOLATION]}
