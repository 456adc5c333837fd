# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of keys in docs/migrating.md, from which errors about pasted keys are made too."""

from __future__ import annotations

import re

from whet.config.keys import TABLES

_TABLE = re.compile(r"^## (From .*)\n(?:(?!## |\|).*\n)*((?:\|.*\n)+)", re.MULTILINE)  # the first one below a heading


def page(text: str) -> str:
    """Returns the new page for the current text `text`, with the current tables."""
    tables = dict(_TABLE.findall(TABLES.read_text(encoding="utf-8")))
    return _TABLE.sub(lambda found: found[0].removesuffix(found[2]) + tables[found[1]], text)
