# SPDX-License-Identifier: Apache-2.0
"""The keys of verl, EasyR1, ROLL and TRL with their counterparts, from foreign_keys.yaml, which explains its fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from whet.config.keys import is_known
from whet.config.section import Section

TABLES = Path(__file__).with_name("foreign_keys.yaml")
UNSET = object()  # the default of a key that has none in the table


@dataclass(frozen=True)
class Row:
    """Keys of a framework, one or several, and what becomes of their values."""

    theirs: tuple[str, ...]  # keys, some as key=value
    ours: tuple[str, ...] = ()
    remark: str = ""
    default: Any = UNSET
    values: Mapping[Any, Any] = field(default_factory=dict)
    when: Mapping[str, Any] = field(default_factory=dict)
    kind: Literal["speed", "same", "check"] | None = None
    unit: str | None = None
    join: str | None = None

    def pairs(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yields each key of the framework with its counterparts."""
        paired = len(self.theirs) == len(self.ours)
        for number, key in enumerate(self.theirs):
            yield key, self.ours[number : number + 1] if paired else self.ours


@dataclass(frozen=True)
class Table:
    """The rows of a framework, or of its older versions."""

    title: str
    system: str
    rows: tuple[Row, ...]
    implied: Mapping[str, Any] = field(default_factory=dict)
    trainer: str = ""  # the table is for this trainer alone, and its rows replace those of other tables
    notes: tuple[str, ...] = ()  # what has to be checked by hand
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # published files of keys, by path


@dataclass(frozen=True)
class ForeignKey:
    """A key of another system and its counterparts; `ours` is empty where there is none."""

    system: str
    key: str
    ours: tuple[str, ...]  # keys, some as key=value
    remark: str


@cache
def tables() -> tuple[Table, ...]:
    """Reads all tables."""
    found = yaml.load(TABLES.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return tuple(Table(**{**each, "rows": tuple(_row(row) for row in each["rows"])}) for each in found)


def _row(row: Mapping[str, Any]) -> Row:
    lists = {name: row.get(name, []) for name in ("theirs", "ours")}
    return Row(**{**row, **{name: tuple([keys] if isinstance(keys, str) else keys) for name, keys in lists.items()}})


@cache
def foreign_keys() -> tuple[ForeignKey, ...]:
    """Returns all keys of the tables."""
    return tuple(
        ForeignKey(table.system, key.partition("=")[0], ours, row.remark)
        for table in tables()
        for row in table.rows
        for key, ours in row.pairs()
    )


def foreign_key(schema: type[Section], key: str) -> str | None:
    """Returns what to write instead of another system's key (or a key below it); None for a key of no known system."""
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
