# SPDX-License-Identifier: Apache-2.0
"""The JSON Schema of recipe files, for editors: completion, meanings, errors.

No key is required, since a recipe has only the keys that it changes. The schema also allows what the loader accepts
beyond plain values: a `defaults` list, empty sections, a string for a list of one, `${...}` for any value. Draft 7,
since editors support it."""

from __future__ import annotations

from typing import Any

from whet.config.compose import shipped_recipes
from whet.config.section import Section

ANNOTATIONS = ("description", "default", "examples")
INTERPOLATION = {"type": "string", "pattern": r"\$\{"}


def json_schema(schema: type[Section]) -> dict[str, Any]:
    """The schema of the recipes of a command; `$defs` has the schemas of sections, for files of config groups."""
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


def _as_written(field: dict[str, Any]) -> dict[str, Any]:
    """The schema of a field with everything that a recipe may have there."""
    if "$ref" in field:
        return {"anyOf": [{"$ref": field["$ref"]}, {"type": "null"}]}
    annotations: dict[str, Any] = {key: field[key] for key in ANNOTATIONS if key in field}
    forms: list[dict[str, Any]] = []
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
