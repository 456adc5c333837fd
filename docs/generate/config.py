# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/config.md from the schema: `make pages`."""

from __future__ import annotations

import html
import inspect
from collections.abc import Sequence

from whet.config.commands import commands, schema_of
from whet.config.load import inline
from whet.config.section import Section, describe_type, is_section

MARK = "<!-- Below this line the page is written by `make pages`. -->\n"


def page(text: str) -> str:
    """Returns the new page for the current text `text`; the part above the mark does not change."""
    return text.partition(MARK)[0] + MARK + reference()


def reference(names: Sequence[str] = ()) -> str:
    """Every key of these commands, or of all that ship; a section that is equal to an earlier one only refers to it."""
    lines: list[str] = []
    seen: dict[tuple[type[Section], str], str] = {}
    for schema in map(schema_of, names or commands()):
        lines += ["", f"## `whet {schema.command}`"]
        lines += _section(schema(), "", f" of `whet {schema.command}`", seen)
    return "\n".join(lines) + "\n"


def _section(section: Section, prefix: str, where: str, seen: dict[tuple[type[Section], str], str]) -> list[str]:
    same = seen.setdefault((type(section), section.model_dump_json()), f"`{prefix}`{where}")
    lines = ["", f"### `{prefix}`", ""] if prefix else [""]
    if same != f"`{prefix}`{where}":
        return [*lines, f"The keys and defaults of {same}."]
    fields = type(section).model_fields
    rows = [
        f"| `{name}` | {describe_type(field.annotation, tuple(field.metadata))} | `{inline(section[name])}` "
        f"| {html.escape(field.description or '', quote=False)} |"
        for name, field in fields.items()
        if not is_section(field.annotation)
    ]
    if prefix:
        lines += [inspect.getdoc(type(section)) or "", ""]
    lines += ["| key | takes | default | meaning |", "|---|---|---|---|", *rows] if rows else []
    for name, field in fields.items():
        if is_section(field.annotation):
            lines += _section(section[name], f"{prefix}.{name}".lstrip("."), where, seen)
    return lines
