# SPDX-License-Identifier: Apache-2.0
"""A recipe file as JSON Schema, by which editors complete keys, show what they mean and mark mistakes.

No key is required, since a recipe says only what it changes. What the loader takes beyond plain values is taken here
too: a `defaults` list, empty sections, one text for a list of one, `${...}` for any value. Draft 7: editors know it."""

from __future__ import annotations

from typing import Any

from whet.config.compose import shipped_recipes
from whet.config.section import Section
from whet.registry import (
    ADV_ESTIMATORS,
    AGGREGATIONS,
    ENVIRONMENTS,
    FILTERS,
    KL_FORMS,
    POLICY_LOSSES,
    REJECTIONS,
    REWARDS,
    VALUE_LOSSES,
    WEIGHTS,
    Registry,
)

INTERPOLATION = {"type": "string", "pattern": r"\$\{"}
NAMES: dict[str, Registry] = {  # what may stand in a field, beside any module:function
    "AlgorithmConfig.adv_estimator": ADV_ESTIMATORS,
    "AlgorithmConfig.policy_loss": POLICY_LOSSES,
    "AlgorithmConfig.loss_agg_mode": AGGREGATIONS,
    "KLConfig.form": KL_FORMS,
    "FilterConfig.name": FILTERS,
    "CorrectionConfig.weight": WEIGHTS,
    "CorrectionConfig.rejection": REJECTIONS,
    "CriticConfig.value_loss": VALUE_LOSSES,
    "RewardConfig.function": REWARDS,
    "EnvironmentConfig.name": ENVIRONMENTS,
}


def json_schema(schema: type[Section]) -> dict[str, Any]:
    """The schema of a command's recipes; `$defs` has those of single sections, which group files hold."""
    whole = schema.model_json_schema()
    sections = {schema.__name__: whole, **whole["$defs"]}
    for name, section in sections.items():
        section["properties"] = {
            key: _as_written(field, NAMES.get(f"{name}.{key}")) for key, field in section["properties"].items()
        }
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


def _as_written(field: dict[str, Any], names: Registry | None) -> dict[str, Any]:
    """A field as it may stand in a recipe."""
    if "$ref" in field:
        return {"anyOf": [{"$ref": field["$ref"]}, {"type": "null"}]}
    told: dict[str, Any] = {key: field[key] for key in ("description", "default") if key in field}
    if names is not None:
        told["examples"] = names.names()
    forms: list[dict[str, Any]] = []
    for form in field.get("anyOf", [field]):
        form = {key: value for key, value in form.items() if key not in ("title", "description", "default")}
        if "prefixItems" in form:
            form["items"] = form.pop("prefixItems")[0]  # all alike
        if form.get("type") == "string" and "enum" not in form:
            form["type"] = ["string", "number"]  # 7 is a fine name
        forms.append(form)
        if form.get("type") == "array":
            items = form["items"].get("anyOf", [form["items"]])
            forms += [each for each in items if each.get("type") == "string"]
    return {**told, "anyOf": [*forms, INTERPOLATION]}
