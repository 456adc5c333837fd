# SPDX-License-Identifier: Apache-2.0
"""Turns the keys of another framework into a recipe (`whet config convert`); the keys are in foreign_keys.yaml."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from whet.config.checks import problems
from whet.config.convert_units import UNITS
from whet.config.foreign import UNSET, KeyRow, Table, tables
from whet.config.foreign_files import Written, scalar
from whet.config.keys import choices, field_at, is_free, is_known, leaf_fields
from whet.config.load import load_config
from whet.config.render import value_lines
from whet.config.schema import TrainConfig
from whet.errors import ConfigError, RegistryError

NAMES_OF_RUNS = {"trainer.experiment_name", "trainer.project_name", "trainer.run_dir"}
_SWITCH = re.compile(r"\.enabled?$").search
SYSTEMS = {table.system.lower(): table.system for table in tables()}


@dataclass
class Converted:
    """A recipe by dotted key, the origin of each value, and what is not in it, each with the reason."""

    system: str
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    without: list[str] = field(default_factory=list)  # no counterpart
    ignored: list[str] = field(default_factory=list)  # concerns speed, or is without effect
    check: list[str] = field(default_factory=list)

    def to_yaml(self) -> str:
        """The recipe as YAML, with the origin of each value and the three lists as comments."""
        tree: dict[str, Any] = {}
        for key, value in self.values.items():
            *sections, name = key.split(".")
            place = tree
            for each in sections:
                place = place.setdefault(each, {})
            place[name] = value
        order = list(TrainConfig.model_fields)
        ordered = {name: tree[name] for name in sorted(tree, key=order.index)}
        lines = [f"# Converted from {self.system} by `whet config convert`."]
        titles = {"check": "Check by hand", "without": "Without a counterpart", "ignored": "Ignored"}
        for name, title in titles.items():
            found = list(dict.fromkeys(getattr(self, name)))
            lines += [f"# {title}:", *(f"#   {_one_line(line)}" for line in found)] if found else []
        for line, key in value_lines(ordered):
            origin = self.origins.get(key) or next((o for k, o in self.origins.items() if key.startswith(f"{k}.")), "")
            lines.append(f"{line}  # {_one_line(origin)}" if key else line)
        return "\n".join(lines) + "\n"


def convert(written: Written, system: str) -> Converted:
    """Returns the recipe for the keys of a file or command of verl, easyr1, roll or trl.  Raises: ConfigError."""
    if system.lower() not in SYSTEMS:
        raise ConfigError(f"--from {system} is no known framework; expected {', '.join(SYSTEMS)}")
    result = Conversion(written, SYSTEMS[system.lower()]).run()
    sweeps = dict[str, list[str]]()  # words of `-m` that give the turns of each loop
    for loop, turns in written.loops.items():
        others = (Conversion(replace(written, values=turn), result.system).run().values for turn in turns)
        recipes = [result.values, *others]
        keys = sorted({key for recipe in recipes for key in recipe} - NAMES_OF_RUNS)
        texts = {key: [shlex.quote(str(recipe.get(key, "null"))) for recipe in recipes] for key in keys}
        sweeps[loop] = [f"{key}={','.join(dict.fromkeys(each))}" for key, each in texts.items() if len({*each}) > 1]
        told = " ".join(sweeps[loop]) or "nothing differs"
        told += ", which change together: run each pair of values by itself" if len(sweeps[loop]) > 1 else ""
        result.check.append(f"`{loop}`: the recipe is that of the first turn; over all turns: {told}")
    if words := [each[0] for each in sweeps.values() if len(each) == 1]:
        result.check.append(f"the runs of the loops: whet train RECIPE -m {' '.join(words)}")
    return result


class Conversion:
    """The keys of one file or command, and the recipe that they become row by row."""

    def __init__(self, written: Written, system: str) -> None:
        self.given = {key: value for key, value in written.values.items() if value is not None}
        self.nulls = written.values.keys() - self.given
        self.unread = {found[1] for line in written.unread if (found := re.match(r"(?:--)?([\w.]+)[ =]", line))}
        self.result = Converted(system, check=list(written.unread))
        trainers = ("", self.given.pop("trainer", "")) if system == "TRL" else ("",)
        self.tables: list[Table] = [each for each in tables() if each.system == system and each.trainer in trainers]
        replaced = {key for table in self.tables if table.trainer for row in table.rows for key in row.theirs}
        self.rows = [
            row for table in self.tables for row in table.rows if table.trainer or not replaced.intersection(row.theirs)
        ]
        self.result.check += [note for table in self.tables for note in table.notes]
        names = [key.partition("=")[0] for row in self.rows for key in row.theirs]
        for key, value in list(self.given.items()):
            if isinstance(value, dict) and any(name.startswith(f"{key}.") for name in names):
                self.given |= {f"{key}.{name}": each for name, each in self.given.pop(key).items()}
        for row in self.rows:
            key = row.theirs[0]
            if row.unit is not None and (below := {k: v for k, v in self.given.items() if k.startswith(f"{key}.")}):
                self.given[key] = below  # a key of a mapping, as a whole
        self.defaults = {
            key.partition("=")[0]: row.default for row in self.rows for key in row.theirs if row.default is not UNSET
        }

    def run(self) -> Converted:
        """Converts row by row, those that read what others wrote last; then drops what whet would not read."""
        for row in sorted(self.rows, key=lambda row: row.unit is not None):
            if row.join is not None:
                self._join(row)
                continue
            for key, ours in row.pairs():
                self._convert(row, key, ours)
        self._unknown()
        for table in self.tables:
            for key, value in table.implied.items():
                self.write(key, value, f"always in {table.system}", over=False)
        self._drop_unread()
        self._validate()
        self._count_defaults()
        return self.result

    def value(self, key: str) -> Any:
        """The value of a key of theirs, or its default."""
        found = self.given.get(key, self.defaults.get(key))
        if isinstance(found, str) and (reference := re.fullmatch(r"\$\{([\w.]+)\}", found)):
            return self.value(reference[1])
        return found

    def write(self, key: str, value: Any, origin: str, *, over: bool = True) -> None:
        """Sets a key of the recipe. A key that another one has set keeps its value, and the difference is told."""
        if key in self.result.values:
            if over and self.result.values[key] != value and not origin.startswith("default"):
                if self.result.origins[key].startswith(("default", "always")):
                    self.result.values[key], self.result.origins[key] = value, origin
                else:
                    self.result.check.append(f"{origin}: {key} is {self.result.values[key]} already, not {value}")
            return
        self.result.values[key], self.result.origins[key] = value, origin

    def _convert(self, row: KeyRow, pattern: str, ours: tuple[str, ...]) -> None:
        key, _, wanted = pattern.partition("=")
        if key not in self.given and row.default is UNSET:
            return
        value = self.value(key)
        origin = f"default of {self.result.system}: {key}" + ", whose value was not read" * (key in self.unread)
        shown, origin = f"{key}={value}", key if key in self.given else origin
        if (unmet := self._unmet(row)) is not None:
            if key in self.given and not self._by_another(row, key, value):
                self.result.ignored.append(f"{shown}: without effect, since {unmet}")
        elif wanted and value != scalar(wanted) and (row.kind != "speed" and wanted != "FILE"):
            if value and not self._by_another(row, key, value):
                self.result.check.append(f"{shown}: only {pattern} has a counterpart" + _remark(row))
        elif row.unit is not None:
            for target, each in UNITS[row.unit](self, key, value, row, ours):
                self.write(target, each, origin)
        elif row.kind == "speed":
            self.result.ignored.append(f"{shown}: concerns speed or memory" + _remark(row))
        elif row.kind == "same":
            self.result.ignored.append(f"{shown}: {row.remark or 'whet always does this, or reads it with other keys'}")
        elif row.kind == "check" and value and not (isinstance(value, (str, int)) and row.values.get(value) == {}):
            asked = f"set {' and '.join(ours)}{_remark(row)}" if ours else row.remark
            self.result.check.append(f"{shown}: {asked}")
        elif row.kind == "check":
            self.result.ignored.append(f"{shown}: the same here")
        elif not ours:
            self.result.without.append(shown + _remark(row))
        else:
            self._copy(row, value, ours, origin)

    def _copy(self, row: KeyRow, value: Any, ours: tuple[str, ...], origin: str) -> None:
        """Writes a value, translated by the row; of a list each item."""
        if isinstance(value, list):
            value = [row.values.get(each, each) if isinstance(each, str) else each for each in value]
        elif isinstance(value, (str, int, float, bool)) and value in row.values:
            value = row.values[value]
        if isinstance(value, Mapping) and not (ours and is_free(field_at(TrainConfig, ours[0].split("."))[1])):
            for key, each in value.items():
                self.write(key, each, origin)
            return
        for target in ours:
            key, _, setting = target.partition("=")
            field = leaf_fields(TrainConfig).get(key)
            if field is not None and field.annotation == list[str] and isinstance(value, str):
                value = [each.strip() for each in value.split(",")]
            self.write(key, scalar(setting) if setting else value, origin)

    def _join(self, row: KeyRow) -> None:
        """Several keys that become one, such as a file and a function in it."""
        if row.theirs[0] in self.given:
            parts = [str(self.given.get(key, "compute_score")) for key in row.theirs]
            self.write(row.ours[0], str(row.join).join(parts), row.theirs[0])

    def _unmet(self, row: KeyRow) -> str | None:
        for key, wanted in row.when.items():
            value = self.value(key)
            allowed = wanted if isinstance(wanted, list) else [wanted]
            met = bool(value) if wanted == "set" else not value if wanted == "unset" else value in allowed
            if not met:
                return f"{key} is {value if value is not None else 'not set'}"
        return None

    def _by_another(self, row: KeyRow, key: str, value: Any) -> bool:
        """Tells whether another row converts this value of a key."""
        others = (each for each in self.rows if each is not row and self._unmet(each) is None)
        patterns = (theirs.partition("=") for each in others for theirs in each.theirs)
        return any(name == key and (not sign or value == scalar(wanted)) for name, sign, wanted in patterns)

    def _unknown(self) -> None:
        """Keys that no row has: those below a key of a row are converted with it, the others told."""
        known = {key.partition("=")[0]: row for row in self.rows for key in row.theirs}
        if self.given and not any(key == each or key.startswith(f"{each}.") for key in self.given for each in known):
            found = f"{', '.join(list(self.given)[:3])}{', ...' if len(self.given) > 3 else ''}"
            raise ConfigError(f"no key of {self.result.system} is set, but {found}; name a file or command of it")
        for key, value in self.given.items():
            if key in known:
                continue
            above = [each for each in known if key.startswith(f"{each}.")]
            row = known[max(above, key=len)] if above else KeyRow((key,), remark="no key that whet knows")
            if row.unit is not None:
                continue
            mapping = next((each for each in row.ours if is_free(field_at(TrainConfig, each.split("."))[1])), None)
            if mapping is not None and row.kind is None:
                self.write(f"{mapping}.{key[len(max(above, key=len)) + 1 :]}", value, key)
            elif row.kind in ("speed", "same"):
                self.result.ignored.append(f"{key}={value}: concerns speed or memory, or is always so")
            else:
                target = self.result.check if row.kind == "check" else self.result.without
                target.append(f"{key}={value}" + _remark(row))

    def _drop_unread(self) -> None:
        """Drops options that the function does not have, an aggregation beside a fixed one, and an idle critic."""
        from whet.config.algorithm_checks import uses_critic
        from whet.registry import ADV_ESTIMATORS, POLICY_LOSSES

        values = self.result.values
        self._drop_unregistered()
        algorithm = self._section("algorithm")
        entries = {
            "algorithm.adv_options": ADV_ESTIMATORS[algorithm.adv_estimator],
            "algorithm.loss_options": POLICY_LOSSES[algorithm.policy_loss],
        }
        for prefix, entry in entries.items():
            for key in [key for key in values if key.startswith(f"{prefix}.")]:
                if key.removeprefix(f"{prefix}.") not in entry.options:
                    self._drop(key, f"{entry.kind} {entry.name} does not read it")
        for entry in entries.values():
            fixed = entry.marks.get("aggregation")
            if fixed and values.get("algorithm.loss_agg_mode", fixed) != fixed:
                note = f"{values['algorithm.loss_agg_mode']} there, but {entry.name} is defined with {fixed} here"
                self.result.check.append(f"algorithm.loss_agg_mode: {note}")
                self._drop("algorithm.loss_agg_mode", note)
        if not uses_critic(self._section("algorithm")):
            for key in [key for key in values if key.startswith("critic.")]:
                self._drop(key, "no critic is trained")
        if "algorithm.kl.where" not in values:
            values["algorithm.kl.where"], self.result.origins["algorithm.kl.where"] = "none", "no KL term"

    def _drop_unregistered(self) -> None:
        """Drops functions that whet does not have, with their options, and asks for them."""
        from whet.registry import ADV_ESTIMATORS, POLICY_LOSSES

        values, origins = self.result.values, self.result.origins
        registries = {"adv_estimator": (ADV_ESTIMATORS, "adv_options"), "policy_loss": (POLICY_LOSSES, "loss_options")}
        for name, (registry, of_function) in registries.items():
            key, options = f"algorithm.{name}", f"algorithm.{of_function}"
            if key not in values or values[key] in registry:
                continue
            dropped = [key, *(each for each in values if each.startswith(f"{options}."))]
            given = [origins[each] for each in dropped[1:] if not origins[each].startswith("default")]
            asked = f", and {options} to its {', '.join(given)}" if given else ""
            self.result.check.append(f"{origins[key]}={values[key]}: set {key} as path/file.py:function{asked}")
            for each in dropped:
                del values[each], origins[each]

    def _drop(self, key: str, why: str) -> None:
        if key in self.result.values:
            del self.result.values[key]
            origin = self.result.origins.pop(key)
            if not origin.startswith("default"):
                self.result.ignored.append(f"{origin}: {why}")

    def _section(self, name: str) -> Any:
        """A section of the config with the values so far."""
        chosen = {key: value for key, value in self.result.values.items() if key.startswith(f"{name}.")}
        known = {f"{key}": value for key, value in chosen.items() if key in choices(TrainConfig)}
        try:
            return load_config(TrainConfig, None, known, checked=False).config[name]
        except (ConfigError, RegistryError) as error:
            self.result.check.append(str(error))
            for key in known:
                self._drop(key, "refused")
            return load_config(TrainConfig, None, {}, checked=False).config[name]

    def _validate(self) -> None:
        """Drops values that whet refuses, and tells what `whet train` would object to."""
        for key in [key for key in self.result.values if not is_known(TrainConfig, key)]:
            self._drop(key, "no key")
        for _ in range(len(self.result.values)):
            try:
                loaded = load_config(TrainConfig, None, self.result.values, checked=False)
            except ConfigError as error:
                lines = str(error).splitlines()
                refused = [
                    key for key in self.result.values for line in lines if line.startswith((f"{key}=", f"{key}."))
                ]
                self.result.check += lines
                if not refused:
                    raise
                for key in refused:
                    self._drop(key, "refused")
                continue
            self.result.check += [f"whet train: {line}" for line in problems(loaded.config)]
            return

    def _count_defaults(self) -> None:
        """Counts the lines about keys at their default, or in a section that is switched off, in place of them."""
        off = tuple(
            f"{key.rpartition('.')[0]}." for key, value in self.given.items() if value is False and _SWITCH(key)
        )
        defaults = {k for k, v in self.given.items() if any(table.is_default(k, v) for table in self.tables)}
        quiet = defaults | {key for key in self.given if key.startswith(off)}
        lists = (self.result.check, self.result.without, self.result.ignored)
        before = sum(map(len, lists))
        for lines in lists:
            lines[:] = [line for line in lines if re.split("[=:]", line, maxsplit=1)[0] not in quiet]
        if left_out := before - sum(map(len, lists)):
            told = f"{left_out} keys at the default of {self.result.system}, switched off, or not about training"
            self.result.ignored.append(told)


def _one_line(text: str) -> str:
    return "\\n".join(text.splitlines())


def _remark(row: KeyRow) -> str:
    return f" ({row.remark})" if row.remark else ""
