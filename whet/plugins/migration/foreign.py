# SPDX-License-Identifier: Apache-2.0
"""The keys of other frameworks with whet's counterparts, from foreign_keys.yaml, which explains its fields."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import yaml

from whet.config.section import Section, is_known
from whet.errors import ConfigError
from whet.options import as_list
from whet.registry import register_part

TABLES = sorted(Path(__file__).parent.glob("foreign_keys*.yaml"))
UNSET = object()  # the default of a key that has none in the table


@dataclass(frozen=True)
class KeyRow:
    """Keys of another framework, or a single key, and the rule that converts their values."""

    theirs: tuple[str, ...]  # keys, some as key=value
    ours: tuple[str, ...] = ()
    remark: str = ""
    default: object = UNSET
    values: Mapping[Any, Any] = field(default_factory=dict)
    when: Mapping[str, object] = field(default_factory=dict)
    kind: Literal["speed", "same", "check", "parallel"] | None = None
    unit: str | None = None
    formula: str | None = None
    join: str | None = None

    def without(self, keys: Collection[str]) -> list[KeyRow]:
        """Returns the row without `keys`, in a list; an empty list if no key is left, or if the row needs all."""
        left = [(key, ours) for key, ours in self.pairs() if key not in keys]
        if len(left) == len(self.theirs):
            return [self]
        if self.join or (self.unit and len(self.theirs) > 1) or not left:
            return []
        paired = len(self.theirs) == len(self.ours)
        ours = tuple(each for _, own in left for each in own) if paired else self.ours
        return [replace(self, theirs=tuple(key for key, _ in left), ours=ours)]

    def pairs(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yields each key of the other framework with its counterparts in whet."""
        paired = len(self.theirs) == len(self.ours)
        for number, key in enumerate(self.theirs):
            yield key, self.ours[number : number + 1] if paired else self.ours


@dataclass(frozen=True)
class Table:
    """The rows for one framework, or for one trainer or older version of a framework."""

    title: str
    system: str
    rows: tuple[KeyRow, ...]
    implied: Mapping[str, object] = field(default_factory=dict)
    origin: str = "always in {system}"  # of the implied values
    trainer: str = ""  # the table is for this trainer alone, and its rows replace those of other tables
    command: str = "train"  # command of whet that does the same as the trainer
    trainers: tuple[Mapping[str, Any], ...] = ()  # rules: the trainer of a program or of keys, or why whet refuses it
    renamed: Mapping[str, str] = field(default_factory=dict)  # keys that an older version has by another name
    notes: tuple[str, ...] = ()  # what has to be checked by hand
    files: Mapping[str, Mapping[str, object]] = field(default_factory=dict)  # published files of keys, by path
    configs: Mapping[str, str] = field(default_factory=dict)  # our nearest recipe, by the name of a published config
    speed: tuple[str, ...] = ()  # beginnings of further keys that concern speed, memory or logs
    quiet: tuple[str, ...] = ()  # patterns of keys that say nothing about training
    defaults: Mapping[str, Mapping[str, object]] = field(default_factory=dict)  # by pattern of a section and by name

    def is_default(self, key: str, value: object) -> bool:
        """Tells whether the report may leave out a key: it has its default, or does not concern training."""
        section, _, name = key.rpartition(".")
        given = (each.get(name, UNSET) for pattern, each in self.defaults.items() if fnmatchcase(section, pattern))
        return any(fnmatchcase(key, pattern) for pattern in self.quiet) or value in given


@cache
def tables() -> tuple[Table, ...]:
    """Reads all tables of keys."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found = [each for file in TABLES for each in yaml.load(file.read_text(encoding="utf-8"), Loader=loader)]
    return tuple(Table(**{**each, "rows": tuple(_row(row) for row in each["rows"])}) for each in found)


def _row(row: Mapping[str, Any]) -> KeyRow:
    lists = {name: row.get(name, []) for name in ("theirs", "ours")}
    return KeyRow(**{**row, **{name: tuple(as_list(keys)) for name, keys in lists.items()}})


def trainer_of(system: str, program: str, keys: Mapping[str, object]) -> tuple[str, bool]:
    """Returns the trainer that a program or the keys select, and whether the program belongs to the framework.

    Raises: ConfigError for a trainer that whet cannot convert."""
    rules = [rule for table in tables() if table.system == system for rule in table.trainers]
    has = ", ".join(dict.fromkeys(str(rule["of"]) for rule in rules if "of" in rule))
    given = [f"{key}={value}" for key, value in keys.items()]
    named = [bool("program" in rule and re.search(rule["program"], program)) for rule in rules]
    for rule, is_named in zip(rules, named, strict=True):
        if is_named or any(key.startswith(each) for each in rule.get("keys", ()) for key in given):
            if "refused" in rule:
                raise ConfigError(system, rule["refused"], f"a trainer that is converted: {has}")
            return str(rule["trainer"]), any(named) or " " not in program
    if program and rules:
        raise ConfigError(system, f"no trainer that whet knows: `{program[:200]}`", has, "name another program")
    return "", True


@cache
def foreign_keys() -> tuple[tuple[str, str, tuple[str, ...], str], ...]:
    """Returns all keys of the tables: framework, key, its counterparts (some as key=value), remark."""
    return tuple(
        (table.system, key.partition("=")[0], ours, row.remark)
        for table in tables()
        if table.command == "train"
        for row in table.rows
        for key, ours in row.pairs()
    )


@register_part("foreign_config")
def foreign_config(name: str) -> str | None:
    """Returns advice for the name of another framework's published config; None for any other name."""
    found = [(table.system, table.configs[name]) for table in tables() if name in table.configs]
    told = " and ".join(f"a config of {system}: name the recipe {ours}" for system, ours in found)
    convert = f"`whet config convert SCRIPT --from {'|'.join(system.lower() for system, _ in found)}`"
    return f"{told}, or convert your script: {convert}" if found else None


@register_part("foreign_key")
def foreign_key(schema: type[Section], key: str) -> str | None:
    """Returns advice for another framework's `key`: whet's keys for it, or for a key above it; None if unknown."""
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
