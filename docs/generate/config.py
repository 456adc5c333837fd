# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/config.md, written from the schema: `make pages`."""

from __future__ import annotations

import html

from whet.config.keys import describe_type, is_section
from whet.config.render import inline
from whet.config.schema import EvalConfig, GenerateConfig, SFTConfig, TrainConfig
from whet.config.section import Section

MARK = "<!-- Below this line the page is written by `make pages`. -->\n"


def page(text: str) -> str:
    """The page whose text so far is `text`: what stands above the mark stays."""
    return text.partition(MARK)[0] + MARK + reference()


def reference() -> str:
    """Every key of every command by section; keys that are the same as in a section before are not told again."""
    lines: list[str] = []
    told: dict[tuple[type[Section], str], str] = {}
    for schema in (TrainConfig, SFTConfig, EvalConfig, GenerateConfig):
        lines += ["", f"## `whet {schema.command}`"]
        lines += _section(schema(), "", f" of `whet {schema.command}`", told)
    return "\n".join(lines) + "\n"


def _section(section: Section, prefix: str, where: str, told: dict[tuple[type[Section], str], str]) -> list[str]:
    same = told.setdefault((type(section), section.model_dump_json()), f"`{prefix}`{where}")
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
        lines += [type(section).__doc__ or "", ""]
    lines += ["| key | takes | default | meaning |", "|---|---|---|---|", *rows] if rows else []
    for name, field in fields.items():
        if is_section(field.annotation):
            lines += _section(section[name], f"{prefix}.{name}".lstrip("."), where, told)
    return lines
