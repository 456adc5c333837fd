# SPDX-License-Identifier: Apache-2.0
"""A recipe file as JSON Schema, by which editors complete keys, show what they mean and mark mistakes.

No key is required, since a recipe says only what it changes. What the loader takes beyond plain values is taken here
too: a `defaults` list, empty sections, one text for a list of one, `${...}` for any value. Draft 7: editors know it."""

from __future__ import annotations

from typing import Any

from whet.config.compose import shipped_recipes
from whet.config.section import Section

TOLD = ("description", "default", "examples")
INTERPOLATION = {"type": "string", "pattern": r"\$\{"}


def json_schema(schema: type[Section]) -> dict[str, Any]:
    """The schema of a command's recipes; `$defs` has those of single sections, which group files hold."""
    whole = schema.model_json_schema()
    for section in (whole, *whole["$defs"].values()):
        section["properties"] = {key: _as_written(field) for key, field in section["properties"].items()}
    part = {"anyOf": [{"type": "string", "examples": shipped_recipes()}, {"type": "object"}]}
    whole["properties"]["defaults"] = {"description": "recipes that this one builds on, in order", "items": part}
    if "reward" in whole["properties"]:
        text = {"type": ["string", "null"]}
        whole["properties"]["custom_reward_function"] = {
            "description": "verl's way to say reward.function",
            "type": ["object", "null"],
            "properties": {"path": text, "name": text},
            "additionalProperties": False,
        }
    return {"$schema": "http://json-schema.org/draft-07/schema#", **whole}


def _as_written(field: dict[str, Any]) -> dict[str, Any]:
    """A field as it may stand in a recipe."""
    if "$ref" in field:
        return {"anyOf": [{"$ref": field["$ref"]}, {"type": "null"}]}
    told: dict[str, Any] = {key: field[key] for key in TOLD if key in field}
    forms: list[dict[str, Any]] = []
    for form in field.get("anyOf", [field]):
        form = {key: value for key, value in form.items() if key not in ("title", *TOLD)}
        if "prefixItems" in form:
            form["items"] = form.pop("prefixItems")[0]  # all alike
        if form.get("type") == "string" and "enum" not in form:
            form["type"] = ["string", "number"]  # 7 is a fine name
        forms.append(form)
        if form.get("type") == "array":
            items = form["items"].get("anyOf", [form["items"]])
            forms += [each for each in items if each.get("type") == "string"]
    return {**told, "anyOf": [*forms, INTERPOLATION]}
