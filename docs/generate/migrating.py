# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of keys in docs/migrating.md, from which errors about pasted keys are made too."""

from __future__ import annotations

import re
from collections.abc import Iterator

from whet.plugins.migration.foreign import UNSET, KeyRow, Table, tables

_TABLE = re.compile(r"^## (From .*)\n(?:(?!## |\|).*\n)*((?:\|.*\n)+)", re.MULTILINE)  # the first one below a heading
KINDS = {"speed": "concerns speed or memory", "check": "set by hand", "parallel": "left out"}


def page(text: str) -> str:
    """Returns the new page for the current text `text`, with the current tables."""
    written = {table.title: "".join(_lines(table)) for table in tables()}
    return _TABLE.sub(lambda found: found[0].removesuffix(found[2]) + written[found[1]], text)


def _lines(table: Table) -> Iterator[str]:
    yield f"| {table.system} | whet | |\n|---|---|---|\n"
    for row in table.rows:
        ours = ", ".join(f"`{key}`" for key in row.ours) or "none"
        yield f"| {', '.join(f'`{key}`' for key in row.theirs)} | {ours} | {_remark(row)}{' ' * bool(_remark(row))}|\n"


def _remark(row: KeyRow) -> str:
    parts = [row.remark, KINDS.get(row.kind or "", "")]
    if row.default not in (UNSET, None) and "default:" not in row.remark and "${" not in str(row.default):
        parts.append(f"default there: {str(row.default).lower()}".replace("\n", "\\n"))
    return "; ".join(part for part in parts if part)
