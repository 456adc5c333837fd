# SPDX-License-Identifier: Apache-2.0
"""Converts the keys of another framework into a recipe (`whet config convert`). foreign_keys.yaml lists the keys."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from whet.config.algorithm_checks import uses_critic
from whet.config.checks import problems
from whet.config.commands import schema_of
from whet.config.compose import put
from whet.config.load import load_config, value_lines
from whet.config.schema import TrainConfig
from whet.config.section import Section, Values, field_at, is_free, is_known, leaf_fields
from whet.errors import ConfigError
from whet.options import as_list
from whet.plugins.migration import convert_units
from whet.plugins.migration.convert_units import Key, place
from whet.plugins.migration.foreign import UNSET, KeyRow, tables, trainer_of
from whet.plugins.migration.foreign_files import Written, scalar
from whet.plugins.migration.foreign_python import calculated
from whet.plugins.migration.foreign_shell_language import OTHER
from whet.registry import ADV_ESTIMATORS, POLICY_LOSSES

MAX_DIFFERENCES = 12  # listed keys of a choice between branches
NAMES_OF_RUNS = {"trainer.experiment_name", "trainer.project_name", "trainer.run_dir"}
_OF_PROCESSES = re.compile(r"cluster\.|rollout\.free_cache_engine|(\w+\.)?engine\.").match  # keys without numbers
_SWITCH = re.compile(r"\.enabled?$").search
SYSTEMS = {table.system.lower(): table.system for table in tables()}


@dataclass
class Converted:
    """The converted recipe: values by dotted key, the origin of each value, and the keys left out with the reason."""

    system: str
    command: str = "train"
    values: Values = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    check: list[str] = field(default_factory=list)  # may change numbers
    without: list[str] = field(default_factory=list)  # no counterpart
    parallel: list[str] = field(default_factory=list)  # concerns processes and devices
    ignored: list[str] = field(default_factory=list)  # without effect here
    speed: list[str] = field(default_factory=list)  # keys that concern speed, memory or logs alone

    def to_yaml(self) -> str:
        """Returns the recipe as YAML, with each value's origin. Comments at the top list keys left out or to check."""
        tree: Values = {}
        for key, value in self.values.items():
            put(tree, key, value)
        order = list(schema_of(self.command).model_fields)
        ordered = {name: tree[name] for name in sorted(tree, key=order.index)}
        lines = [f"# Converted from {self.system} by `whet config convert`."]
        lines += [f"# For `whet {self.command}`."] if self.command != "train" else []
        titles = {"check": "Changes numbers; check by hand", "without": "Changes numbers; without a counterpart"}
        for name, title in (titles | {"parallel": "Parallelism", "ignored": "Without effect here"}).items():
            found = list(dict.fromkeys(getattr(self, name)))
            lines += [f"# {title}:", *(f"#   {_one_line(line)}" for line in found)] if found else []
        speed = len(set(self.speed))
        lines += [f"# Speed, memory and logs: {speed} {'key' if speed == 1 else 'keys'} not carried over"] * bool(speed)
        for line, key in value_lines(ordered):
            origin = self.origins.get(key) or next((o for k, o in self.origins.items() if key.startswith(f"{k}.")), "")
            lines.append(f"{line}  # {_one_line(origin)}" if key else line)
        return "\n".join(lines) + "\n"


def convert(written: Written, system: str) -> Converted:
    """Converts the keys of a file or command of another framework into a recipe. `system` is a framework, or a
    framework with a trainer or version after an @ (verl@0.3).  Raises: ConfigError."""
    name, _, trainer = system.lower().partition("@")
    known = [f"{table.system.lower()}@{table.trainer}" for table in tables() if table.trainer]
    if name not in SYSTEMS or (trainer and system.lower() not in known):
        raise ConfigError("--from", system, f"one of {', '.join([*SYSTEMS, *known])}", "correct the name")
    found, is_own = (trainer, True) if trainer else trainer_of(SYSTEMS[name], written.program, written.values)
    if not is_own:
        written.unread.append(f"`{written.program[:200]}` is no program of {SYSTEMS[name]}: its own keys are not read")
    written = replace(written, trainer=found)
    result = Conversion(written, SYSTEMS[name]).run()
    _check_branches(written, result)
    sweeps = dict[str, list[str]]()  # for each loop the words of `-m` that run its turns
    for loop, turns in written.loops.items():
        recipes = [_recipe(written, result, values) for values in (written.values, *turns)]
        for key in _differing(recipes):
            texts = (shlex.quote(str(recipe.get(key, "null"))) for recipe in recipes)
            sweeps.setdefault(loop, []).append(f"{key}={','.join(dict.fromkeys(texts))}")
        told = " ".join(sorted(sweeps.get(loop, []))) or "no key differs"
        told += ", which change together: run each pair of values by itself" if len(sweeps.get(loop, [])) > 1 else ""
        result.check.append(f"`{loop}`: the recipe has the first turn's values; over all turns: {told}")
    if words := [each[0] for each in sweeps.values() if len(each) == 1]:
        result.check.append(f"to run all turns of the loops: whet {result.command} RECIPE -m {' '.join(words)}")
    return result


def _recipe(written: Written, result: Converted, values: Values) -> Values:
    """Converts the `values` of one loop iteration or script branch. Leaves out keys that only name a run."""
    found = Conversion(replace(written, values=values), result.system).run().values
    return {key: value for key, value in found.items() if key not in NAMES_OF_RUNS}


def _differing(recipes: Sequence[Mapping[str, object]]) -> list[str]:
    keys = dict.fromkeys(key for recipe in recipes for key in recipe)
    return [key for key in keys if len({str(recipe.get(key)) for recipe in recipes}) > 1]


def _check_branches(written: Written, result: Converted) -> None:
    """Raises: ConfigError if the recipe depends on a branch of unknown condition. The error lists the alternatives."""
    choices = list[str]()
    for name, ways in written.branches.items():
        recipes = {value: _recipe(written, result, values) for value, values in ways.items()}
        differ = _differing(list(recipes.values()))
        is_choice = not all(map(_OF_PROCESSES, differ))
        for value, recipe in list(recipes.items())[not is_choice :] if differ else ():
            told = ", ".join(f"{key}={recipe.get(key, 'unset')}" for key in differ[:MAX_DIFFERENCES])
            told += f", and {len(differ) - MAX_DIFFERENCES} more" * (len(differ) > MAX_DIFFERENCES)
            chosen = shlex.quote(f"{name}={'ANY' if value == OTHER else value}")
            (choices if is_choice else result.parallel).append(f"--set {chosen}: {told}")
    if choices:
        change = "choose one of each, or give the resolved config that the framework prints (`--cfg job`), as YAML:"
        found = "branches of the script that change the recipe are not decided"
        raise ConfigError(result.system, found, change="\n  ".join([change, *choices]))


class Conversion:
    """Converts the keys of one file or command into a recipe. Each row of the tables of keys is a rule."""

    def __init__(self, written: Written, system: str) -> None:
        of_system = [each for each in tables() if each.system == system and each.trainer in ("", written.trainer)]
        renamed = {old: new for table in of_system for old, new in table.renamed.items()}
        values = {renamed.get(key, key): value for key, value in written.values.items()}
        self.given = {key: value for key, value in values.items() if value is not None}
        self.nulls = values.keys() - self.given
        told = map(re.compile(r"(?:--)?([\w.]+)[ =]").match, written.unread)
        self.unread = {renamed.get(found[1], found[1]) for found in told if found}
        command = next(each.command for each in of_system if each.trainer == written.trainer)
        self.schema = schema_of(command)
        self.result = Converted(system, command, check=list(written.unread))
        self.tables = [each for each in of_system if each.command == command]
        own = [row for table in self.tables if table.trainer for row in table.rows]
        replaced = {key for row in own for key in row.theirs}
        general = [row for table in self.tables if not table.trainer for row in table.rows]
        self.rows = own + [each for row in general for each in row.without(replaced)]
        self.result.check += [note for table in self.tables for note in table.notes]
        names = [key.partition("=")[0] for row in self.rows for key in row.theirs]
        for key, value in list(self.given.items()):
            if isinstance(value, dict) and any(name.startswith(f"{key}.") for name in names):
                self.given |= {f"{key}.{name}": each for name, each in self.given.pop(key).items()}
        for row in self.rows:
            key = row.theirs[0]
            if row.unit is not None and (below := {k: v for k, v in self.given.items() if k.startswith(f"{key}.")}):
                self.given[key] = below  # the row reads all keys of a mapping at once
        self.defaults = {
            key.partition("=")[0]: row.default for row in self.rows for key in row.theirs if row.default is not UNSET
        }

    def run(self) -> Converted:
        """Applies all rows; rows that read converted values come last. Then drops keys that whet would not read."""
        for row in sorted(self.rows, key=lambda row: row.unit is not None):
            if row.join is not None:
                self._join(row)
                continue
            for key, ours in row.pairs():
                try:
                    self._convert(row, key, ours)
                except ConfigError as error:
                    self.result.check.append(f"{error.key}={error.found}: {error.change}")
                except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError):  # of another type
                    asked = f"set {' and '.join(ours)}; " if ours else ""
                    self.result.check.append(f"{key.partition('=')[0]}={self.value(key)}: {asked}the value is not read")
        self._unknown()
        for table in self.tables:
            for key, value in table.implied.items():
                self.write(key, value, table.origin.format(system=table.system), over=False)
        self._load()
        if self.schema is TrainConfig:
            self._drop_unread()
        place(self)
        self.result.check += [f"whet {self.result.command}: {line}" for line in problems(self._load())]
        self._count_defaults()
        return self.result

    def value(self, key: str) -> Any:
        """Returns the value of `key` in the other framework, or its default."""
        found = self.given.get(key, self.defaults.get(key))
        if isinstance(found, str) and (reference := re.fullmatch(r"\$\{([\w.]+)\}", found)):
            return self.value(reference[1])
        return found

    def write(self, key: str, value: object, origin: str, *, over: bool = True) -> None:
        """Sets `key` if it is unset. With `over` it also replaces a default, and reports any other conflict."""
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
        is_silent = isinstance(value, (str, int, float)) and row.values.get(value) == {}
        if (unmet := self._unmet(row)) is not None:
            if key in self.given and not self._by_another(row, key, value):
                self.result.ignored.append(f"{shown}: without effect, since {unmet}")
        elif wanted and value != scalar(wanted) and (row.kind != "speed" and wanted != "FILE"):
            if value and not self._by_another(row, key, value):
                self.result.check.append(f"{shown}: only {pattern} has a counterpart" + _remark(row))
        elif row.unit is not None:
            for target, each in getattr(convert_units, row.unit)(self, Key(key, value, row, ours)):
                self.write(target, each, origin)
        elif row.kind == "parallel" and not is_silent:
            self.result.parallel.append(f"{shown}: {row.remark}")
        elif row.kind == "check" and value and not is_silent:
            asked = f"set {' and '.join(ours)}{_remark(row)}" if ours else row.remark
            self.result.check.append(f"{shown}: {asked}")
        elif row.kind is not None:
            self.result.speed.append(key)
        elif not ours:
            self.result.without.append(shown + _remark(row))
        else:
            is_word = row.formula is None or is_silent
            self._copy(row, value if is_word else self._calculated(str(row.formula), value), ours, origin)

    def _calculated(self, formula: str, value: object) -> object:
        """Evaluates the formula of a row. In the formula, {KEY} or {KEY,DEFAULT} is the value of another key."""

        def of_key(found: re.Match[str]) -> str:
            other = self.value(found[1])
            return str(found[2]) if other is None else repr(other)

        return calculated(re.sub(r"\{([\w.]+)(?:,([\w.]+))?\}", of_key, formula), {"value": value})

    def _copy(self, row: KeyRow, value: Any, ours: tuple[str, ...], origin: str) -> None:
        """Writes a value to the keys `ours`, translated by the row's `values`; translates a list item by item."""
        if isinstance(value, list):
            value = [row.values.get(each, each) if isinstance(each, str) else each for each in value]
        elif isinstance(value, (str, int, float, bool)) and value in row.values:
            value = row.values[value]
            if value == {}:
                return
        if isinstance(value, Mapping) and not (ours and is_free(field_at(self.schema, ours[0].split("."))[1])):
            for key, each in value.items():
                self.write(key, each, origin)
            return
        for target in ours:
            key, _, setting = target.partition("=")
            field = leaf_fields(self.schema).get(key)
            if field is not None and field.annotation == list[str] and isinstance(value, str):
                value = [each.strip() for each in value.split(",")]
            self.write(key, scalar(setting) if setting else value, origin)

    def _join(self, row: KeyRow) -> None:
        """Joins several keys into one, such as a file and the function in it."""
        if row.theirs[0] in self.given:
            parts = [str(self.given.get(key, "compute_score")) for key in row.theirs]
            self.write(row.ours[0], str(row.join).join(parts), row.theirs[0])

    def _unmet(self, row: KeyRow) -> str | None:
        for key, wanted in row.when.items():
            value = self.value(key)
            met = bool(value) if wanted == "set" else not value if wanted == "unset" else value in as_list(wanted)
            if not met:
                return f"{key} is {value if value is not None else 'not set'}"
        return None

    def _by_another(self, row: KeyRow, key: str, value: object) -> bool:
        """Tells whether another row converts this value of a key."""
        others = (each for each in self.rows if each is not row and self._unmet(each) is None)
        patterns = (theirs.partition("=") for each in others for theirs in each.theirs)
        return any(name == key and (not sign or value == scalar(wanted)) for name, sign, wanted in patterns)

    def _unknown(self) -> None:
        """Reports keys that no row contains. A key below another row's key is converted with that row."""
        known = {key.partition("=")[0]: row for row in self.rows for key in row.theirs}
        if self.given and not any(key == each or key.startswith(f"{each}.") for key in self.given for each in known):
            found = f"{', '.join(list(self.given)[:3])}{', ...' if len(self.given) > 3 else ''}"
            raise ConfigError(self.result.system, f"only unknown keys: {found}", change="name a file of this framework")
        for key, value in self.given.items():
            if key in known:
                continue
            above = [each for each in known if key.startswith(f"{each}.")]
            row = known[max(above, key=len)] if above else KeyRow((key,), remark="no key that whet knows")
            if not above and any(key.startswith(each) for table in self.tables for each in table.speed):
                row = KeyRow((key,), kind="speed")
            if row.unit is not None:
                continue
            mapping = next((each for each in row.ours if is_free(field_at(self.schema, each.split("."))[1])), None)
            if mapping is not None and row.kind is None:
                self.write(f"{mapping}.{key[len(max(above, key=len)) + 1 :]}", value, key)
            elif row.kind in ("speed", "same"):
                self.result.speed.append(key)
            else:
                by_kind = {"check": self.result.check, "parallel": self.result.parallel}
                by_kind.get(row.kind or "", self.result.without).append(f"{key}={value}" + _remark(row))

    def _drop_unread(self) -> None:
        """Drops unknown options of functions, an aggregation if a function fixes another one, and an unused critic."""
        values = self.result.values
        self._drop_unregistered()
        self._rewrite_equals()
        algorithm = self._load()["algorithm"]
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
        if not uses_critic(algorithm):
            for key in [key for key in values if key.startswith("critic.")]:
                self._drop(key, "no critic is trained")
        if "algorithm.kl.where" not in values:
            values["algorithm.kl.where"], self.result.origins["algorithm.kl.where"] = "none", "no KL term"

    def _rewrite_equals(self) -> None:
        """Replaces values that whet refuses with equivalent values: several greedy validation responses become one, a
        ratio's lower bound below 0 becomes 0, and verl's groups of one response get no baseline, as in verl."""
        values, low = self.result.values, "algorithm.loss_options.clip_ratio_low"
        if not values.get("trainer.validation.temperature") and values.get("trainer.validation.n", 1) > 1:
            values["trainer.validation.n"] = 1
        if isinstance(values.get(low), (int, float)) and values[low] > 1:
            values[low] = 1.0
        if "environment.tools" not in values and "environment.tool_parser" in values:
            self.result.check.append(
                f"environment.tool_parser={values['environment.tool_parser']}: set it with the tools"
            )
            self._drop("environment.tool_parser", "no tools are set")
        alone = values.get("rollout.n") == 1 and values.get("algorithm.adv_estimator") in ("grpo", "rloo")
        if alone and self.result.system == "verl" and "actor_rollout_ref.rollout.n" not in self.unread:
            values["algorithm.adv_estimator"], values["algorithm.adv_options.whiten"] = "reinforce_plus_plus", False
            self.result.origins["algorithm.adv_options.whiten"] = self.result.origins["algorithm.adv_estimator"]
            for key in ("algorithm.adv_options.std_norm", "algorithm.adv_options.eps"):
                self._drop(key, "no effect with one response")

    def _drop_unregistered(self) -> None:
        """Drops functions that whet does not have, with their options, and reports that the user has to set them."""
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

    def _load(self) -> Section:
        """Builds the config from the recipe. Leaves out values that whet refuses, and names them in the report."""
        for key in [key for key in self.result.values if not is_known(self.schema, key)]:
            self._drop(key, "no such key in whet")
        for _ in range(len(self.result.values) + 1):
            try:
                loaded = load_config(self.schema, None, self.result.values, checked=False)
            except ConfigError as error:
                errors = [error, *error.others]
                refused = [
                    key for key in self.result.values if any(f"{each.key}.".startswith(f"{key}.") for each in errors)
                ]
                self.result.check += str(error).splitlines()
                if not refused:
                    raise
                for key in refused:
                    self._drop(key, "whet refuses the value")
                continue
            return loaded.config
        found = f"no key can be converted: {'; '.join(self.result.check[:9])}"
        raise ConfigError(self.result.system, found, change="give other keys")

    def _count_defaults(self) -> None:
        """Counts, but does not list, keys with their default value, or in a section that is switched off."""
        off = tuple(
            f"{key.rpartition('.')[0]}." for key, value in self.given.items() if value is False and _SWITCH(key)
        )
        defaults = {k for k, v in self.given.items() if any(table.is_default(k, v) for table in self.tables)}
        quiet = defaults | {key for key in self.given if key.startswith(off)}
        for lines in (self.result.check, self.result.without, self.result.parallel, self.result.ignored):
            names = [re.split("[=:]", line, maxsplit=1)[0] for line in lines]
            self.result.speed += quiet.intersection(names)
            lines[:] = [line for line, name in zip(lines, names, strict=True) if name not in quiet]


def _one_line(text: str) -> str:
    return "\\n".join(text.splitlines())


def _remark(row: KeyRow) -> str:
    return f" ({row.remark})" if row.remark else ""
