# SPDX-License-Identifier: Apache-2.0
"""The keys of verl, EasyR1, ROLL and TRL with their counterparts, from foreign_keys.yaml, which explains its fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import yaml

from whet.config.keys import is_known
from whet.config.section import Section

TABLES = Path(__file__).with_name("foreign_keys.yaml")
UNSET = object()  # the default of a key that has none in the table


@dataclass(frozen=True)
class KeyRow:
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
    rows: tuple[KeyRow, ...]
    implied: Mapping[str, Any] = field(default_factory=dict)
    trainer: str = ""  # the table is for this trainer alone, and its rows replace those of other tables
    notes: tuple[str, ...] = ()  # what has to be checked by hand
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # published files of keys, by path
    configs: Mapping[str, str] = field(default_factory=dict)  # our nearest recipe, by the name of a published config
    quiet: tuple[str, ...] = ()  # patterns of keys that say nothing about training
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by pattern of a section and by name

    def is_default(self, key: str, value: Any) -> bool:
        """Tells whether a key with its default, or one that says nothing about training, is not worth a line."""
        section, _, name = key.rpartition(".")
        given = (each.get(name, UNSET) for pattern, each in self.defaults.items() if fnmatchcase(section, pattern))
        return any(fnmatchcase(key, pattern) for pattern in self.quiet) or value in given


@cache
def tables() -> tuple[Table, ...]:
    """Reads all tables."""
    found = yaml.load(TABLES.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return tuple(Table(**{**each, "rows": tuple(_row(row) for row in each["rows"])}) for each in found)


def _row(row: Mapping[str, Any]) -> KeyRow:
    lists = {name: row.get(name, []) for name in ("theirs", "ours")}
    return KeyRow(**{**row, **{name: tuple([keys] if isinstance(keys, str) else keys) for name, keys in lists.items()}})


@cache
def foreign_keys() -> tuple[tuple[str, str, tuple[str, ...], str], ...]:
    """Returns all keys of the tables: framework, key, its counterparts (some as key=value), remark."""
    return tuple(
        (table.system, key.partition("=")[0], ours, row.remark)
        for table in tables()
        for row in table.rows
        for key, ours in row.pairs()
    )


def foreign_config(name: str) -> str | None:
    """Advice where a name is that of a published config of another framework."""
    for system, ours in ((table.system, table.configs[name]) for table in tables() if name in table.configs):
        convert = f"`whet config convert SCRIPT --from {system.lower()}`"
        return f"a config of {system}: name the recipe {ours}, or convert your script: {convert}"
    return None


def foreign_key(schema: type[Section], key: str) -> str | None:
    """Returns what to write instead of another system's key (or a key below it); None for a key of no known system."""
    found = [
        (len(theirs), system, ours, f" ({remark})" if remark else "")
        for system, theirs, ours, remark in foreign_keys()
        if f"{key}.".startswith(f"{theirs}.") and all(is_known(schema, own.partition("=")[0]) for own in ours)
    ]
    if found:
        _, system, ours, remark = max(found, key=itemgetter(0))
        return f"a key of {system}" + (f"; write {' and '.join(ours)}" if ours else " without a counterpart") + remark
    top = f"{key.partition('.')[0]}."
    systems = [system for system, theirs, _, _ in foreign_keys() if theirs.startswith(top)]
    if systems and not is_known(schema, top[:-1]):
        return f"a key of {systems[0]}; docs/migrating.md has those of its keys that have a counterpart"
    return None
