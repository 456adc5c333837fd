# SPDX-License-Identifier: Apache-2.0
"""Keys of verl, EasyR1, ROLL and TRL, and what they are here: foreign_keys.md, which docs/migrating.md shows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from whet.config.keys import is_known
from whet.config.section import Section

TABLES = Path(__file__).with_name("foreign_keys.md")
_CODE = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class ForeignKey:
    """A key of another system. `ours` is empty where it has no counterpart."""

    system: str
    key: str
    ours: tuple[str, ...]  # keys, some as key=value
    remark: str


def foreign_key(schema: type[Section], key: str) -> str | None:
    """The sentence that answers a pasted key, or one below it; None where nobody is known to have it."""
    found = [each for each in foreign_keys() if f"{key}.".startswith(f"{each.key}.")]
    found = [each for each in found if all(is_known(schema, ours.partition("=")[0]) for ours in each.ours)]
    if found:
        best = max(found, key=lambda each: len(each.key))
        remark = f" ({best.remark})" if best.remark else ""
        ours = " and ".join(best.ours)
        return f"a key of {best.system}" + (f"; write {ours}{remark}" if ours else f" without a counterpart{remark}")
    top = f"{key.partition('.')[0]}."
    systems = [each.system for each in foreign_keys() if each.key.startswith(top)]
    if systems and not is_known(schema, top[:-1]):
        return f"a key of {systems[0]}; docs/migrating.md has those of its keys that have a counterpart"
    return None


@cache
def foreign_keys() -> tuple[ForeignKey, ...]:
    """Reads all keys of the tables."""
    return tuple(_read(TABLES.read_text(encoding="utf-8")))


def _read(text: str) -> Iterator[ForeignKey]:
    system = ""
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith("| `"):
            system = line.split("|")[1].strip()
        if not line.startswith("| `"):
            continue
        theirs, ours, remark = (cell.strip() for cell in line.strip("|").split(" | "))
        keys, counterparts = _CODE.findall(theirs), tuple(_CODE.findall(ours))
        paired = len(keys) == len(counterparts)
        for number, key in enumerate(keys):
            own = counterparts[number : number + 1] if paired else counterparts
            yield ForeignKey(system, key.partition("=")[0], own, remark.strip("| "))
