# SPDX-License-Identifier: Apache-2.0
"""The tables of keys in docs/migrating.md, which are those that a pasted key is answered from."""

from __future__ import annotations

import re

from whet.config.foreign import TABLES

_TABLE = re.compile(r"^## (From .*)\n(?:(?!## |\|).*\n)*((?:\|.*\n)+)", re.MULTILINE)  # the first one below a heading


def page(text: str) -> str:
    """The page whose text so far is `text`, with the tables as they are now."""
    tables = dict(_TABLE.findall(TABLES.read_text(encoding="utf-8")))
    return _TABLE.sub(lambda found: found[0].removesuffix(found[2]) + tables[found[1]], text)
