# SPDX-License-Identifier: Apache-2.0
"""Writes a config as YAML: for the run folder, and line by line for `whet config`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import yaml

from whet.config.schema import Section


def to_yaml(config: Section) -> str:
    """The whole config as YAML, which `read_config` reads back unchanged."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def keyed_lines(config: Section) -> list[tuple[str, str]]:
    """The lines of the config as YAML, each with the dotted key that it sets, "" for the name of a section."""
    return list(_lines(config.model_dump(mode="json"), ""))


def _lines(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    indent = "  " * prefix.count(".")
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield f"{indent}{name}:", ""
            yield from _lines(value, f"{key}.")
        else:
            yield f"{indent}{name}: {inline(value)}", key


def inline(value: Any) -> str:
    """A value as YAML on one line; text with line breaks becomes a quoted string."""
    if isinstance(value, str) and "\n" in value:
        return json.dumps(value, ensure_ascii=False)
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=float("inf"))
    return text.removesuffix("...\n").rstrip("\n")
