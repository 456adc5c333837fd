# SPDX-License-Identifier: Apache-2.0
"""Reads the keys and values that a file or command of another framework sets. Nothing is run.

Files: YAML with `${key}`, shell scripts, Python scripts with a `...Config(...)` call or a command in the docstring."""

from __future__ import annotations

import ast
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from whet.config.compose import flatten
from whet.config.foreign import tables
from whet.config.foreign_python import arguments_of_calls, attributes_of_configs
from whet.config.foreign_shell import VARIABLE, Shell, is_argument, start_of, statements_of, unrolled
from whet.errors import ConfigError

_IN_NAMES = re.compile(r"\$\((date|git|hostname|id|mktemp|uuidgen|whoami)\b[^()]*\)")
_OF_NAMES = re.compile(r"(name|dir|path|folder)$")  # keys whose values may hold the output of such a program
_REFERENCE = re.compile(r"\$\{(?:oc\.(?:select|env):)?([\w.]+)(?:,([^{}]*))?\}")  # name, default
RENAMED = {"model": "model_name_or_path", "config": "config_file_of_keys"}
RENAMED |= {"r": "lora_r", "target_modules": "lora_target_modules"}  # of peft's LoraConfig
MAX_SWEEP = 100  # turns of a loop around a command that are read
UNREAD = ("defaults", "hydra")  # parts of a file that name other files
_PROCESSES = re.compile(r"--(?:num[_-]processes|nproc[_-]per[_-]node|num[_-]gpus)[ =](\d+)")
_TRAINERS = {"rloo": r"\bRLOO(Config|Trainer)\(|\brloo(\.py)?\s", "async_grpo": r"\bAsyncGRPO(Config|Trainer)\("}


@dataclass
class Written:
    """Values that a file or command sets, by dotted key, and what could not be read."""

    values: dict[str, Any] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    loops: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # values of a loop's later turns


def read(source: str, system: str) -> Written:
    """Reads a file, or a command in one text.  Raises: ConfigError where `source` is neither or sets nothing."""
    path = Path(source)
    exists = os.path.isfile(path)  # noqa: PTH113  # never raises, for a text that is too long for a name either
    if not exists and not re.search(r"\s", source):
        raise ConfigError(f"{source} does not exist; expected a file, or a command in quotes")
    reader = {".yaml": _of_yaml, ".yml": _of_yaml, ".py": _of_python}.get(
        path.suffix if exists else "", partial(_of_shell, script=str(path) if exists else None)
    )
    try:
        text = path.read_text(encoding="utf-8") if exists else source
        written = reader(text, system)
        bases = [_base(values) for turns in written.loops.values() for values in turns]
        if base := _base(written.values):
            _lay_over(written, base, path if exists else Path("command"), system)
        if set(bases) - {base}:
            written.unread.append(f"a loop names several files of keys: all turns have the values of {base}")
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise ConfigError(f"{source}{place}: {error.problem}; expected YAML; correct that place") from error
    except (SyntaxError, ValueError, RecursionError, yaml.YAMLError) as error:
        found = f"cannot be read: {' '.join(str(error).split())}; expected YAML, Python or a shell script, in UTF-8"
        raise ConfigError(f"{source} {found}; correct that place") from error
    if not written.values:
        notes = "".join(f"; {note}" for note in written.unread)
        raise ConfigError(
            f"{source} sets no key of {system}; expected key=value, --key value, YAML or Config(key=value){notes}"
        )
    for trainer, pattern in _TRAINERS.items() if system == "trl" else ():
        if re.search(pattern, text):
            written.values["trainer"] = trainer
    return written


def scalar(value: Any) -> Any:
    """The value of a text as Hydra and YAML 1.2 read it: numbers, true, null, lists, mappings."""
    if isinstance(value, dict):
        return {key: scalar(each) for key, each in value.items()}
    if isinstance(value, list):
        return [scalar(each) for each in value]
    if not isinstance(value, str):
        return value
    for kind in (int, float):
        with suppress(ValueError):
            return kind(value)
    if value[:1] in ("[", "{"):
        with suppress(yaml.YAMLError):
            return scalar(yaml.safe_load(value))
    words = {
        "true": True,
        "false": False,
        "null": None,
        "none": None if value == "None" else "none",
        "~": None,
        "": None,
    }
    plain = value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
    return words.get(value.lower(), plain)


def _base(values: dict[str, Any]) -> str | None:
    """Takes out the keys that name a file of further keys: `config`, or Hydra's `config_path` and `config_name`."""
    folder, name, base = (values.pop(key, None) for key in ("config_path", "config_name", "config"))
    return str(Path(str(folder or ""), str(name).removesuffix(".yaml") + ".yaml")) if name else base and str(base)


def _lay_over(written: Written, base: str, script: Path, system: str) -> None:
    """Adds the keys of the file that a command names, searched beside the script and above it."""
    for folder in (Path(), *script.absolute().parents):
        if os.path.isfile(folder / base):  # noqa: PTH113
            below = _of_yaml((folder / base).read_text(encoding="utf-8"), system)
            _below(written, below.values)
            written.unread += below.unread
            return
    files = {name: keys for table in tables() if table.system.lower() == system for name, keys in table.files.items()}
    published = files.get(os.path.normpath(base), {})
    _below(written, published)
    instead = "the values of the published file" if published else f"the defaults of {system}"
    written.unread.append(f"{base} is not here: its keys are missing; {instead} stand in their place")


def _below(written: Written, values: Mapping[str, Any]) -> None:
    """Adds values where the command sets none, in every turn of its loops."""
    written.values = {**values, **written.values}
    written.loops = {loop: [{**values, **each} for each in turns] for loop, turns in written.loops.items()}


def _of_yaml(text: str, system: str) -> Written:
    found = yaml.safe_load(text)
    if not isinstance(found, dict):
        raise ValueError(f"a {type(found).__name__} instead of keys with values")
    pairs = flatten({k: v for k, v in found.items() if k not in UNREAD})
    values = {str(key): value for key, value in pairs if value != "???"}  # Hydra's mark of a value that is missing
    unread = [f"{part}: names other files, whose keys are missing" for part in UNREAD[:1] if part in found]
    resolved = {RENAMED.get(key, key): scalar(_resolved(value, values, key)) for key, value in values.items()}
    return Written(resolved, unread)


def _resolved(value: Any, values: Mapping[str, Any], key: str, depth: int = 8) -> Any:
    """Replaces `${key}` by the value of that key, where the file has it, and `${oc.select:key,default}` by the default
    where it has not. Variables of the environment may be secrets: `${oc.env:NAME,default}` is its default."""
    if isinstance(value, list):
        return [_resolved(each, values, key, depth) for each in value]
    if not isinstance(value, str) or not depth:
        return value

    def of(found: re.Match[str]) -> Any:
        name = found[1].lstrip(".")
        if dots := len(found[1]) - len(name):  # beside this key, or in sections around it
            name = ".".join([*key.split(".")[:-dots], name])
        if name in values:
            return _resolved(values[name], values, name, depth - 1)
        return found[0] if found[2] is None else found[2].strip()

    if whole := _REFERENCE.fullmatch(value):
        return of(whole)
    replaced = _REFERENCE.sub(lambda found: str(of(found)), value)  # of nested ones the innermost
    return value if replaced == value else _resolved(replaced, values, key, depth - 1)


def _of_python(text: str, system: str) -> Written:
    """Reads the arguments of calls of ...Config and ...Trainer; without any the docstring's first command. What is
    assigned to attributes of configs replaces both."""
    tree = ast.parse(text)
    values, unread = arguments_of_calls(tree)
    written = Written(_renamed(values), unread)
    later, not_read = attributes_of_configs(tree)
    if set(written.values) <= {"model_name_or_path", "reward_funcs"}:
        command = re.search(r"^(accelerate launch|python|trl) .*?(?<!\\)$", ast.get_docstring(tree) or "", re.M | re.S)
        if command:
            of_command = _of_shell(command[0], system)
            written = Written({**written.values, **of_command.values}, [*unread, *of_command.unread])
    return Written({**written.values, **_renamed(later)}, [*written.unread, *not_read])


def _renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {RENAMED.get(key, key): value for key, value in values.items()}


def _of_shell(text: str, system: str, script: str | None = None) -> Written:
    """Reads the arguments of the command that has most of them; the later turns of a loop around it apart."""
    written, loops = _of_turns(text, system, script, {})
    for name, values in loops.items():
        if len(values) > MAX_SWEEP:
            written.unread.append(f"`for {name}` has {len(values):,} turns, of which the first {MAX_SWEEP} were read")
        turns = [_of_turns(text, system, script, {name: turn})[0].values for turn in range(1, len(values[:MAX_SWEEP]))]
        written.loops[f"for {name} in {' '.join(values[:MAX_SWEEP])}"] = turns
    return written


def _of_turns(
    text: str, system: str, script: str | None, turns: Mapping[str, int]
) -> tuple[Written, dict[str, list[str]]]:
    """Reads a script in the given turns of its loops; with the values of each loop around a command."""
    shell, programs, launcher, best = Shell(script, turns), Counter[str](), list[str](), list[str]()
    text = unrolled(text)
    for words in shell.carry_out(list(statements_of(text))):
        start = start_of(words)
        programs[" ".join(words[:start])] += 1
        if sum(map(is_argument, words[start:])) > sum(map(is_argument, best)):
            launcher, best = words[:start], words[start:]
    written = _arguments(best, system)
    if system == "trl" and (processes := _PROCESSES.search(" ".join(launcher))):
        written.values.setdefault("num_processes", int(processes[1]))
    if launcher and programs[" ".join(launcher)] > 1:
        written.unread.append(f"`{' '.join(launcher)}` is run more than once: the recipe is that of one run")
    if undecided := [f"`{each}`" for each in dict.fromkeys(shell.unknown_branches)]:
        written.unread.append(f"{', '.join(undecided)}: not decided; all assignments in it were carried out, in order")
    return written, shell.loops


def _arguments(words: Iterable[str], system: str) -> Written:
    """Reads `key=value`, `--key=value`, and `--key` with the words after it."""
    written, flag = Written(), ""
    for word in words:
        key = word.partition("=")[0] if is_argument(word) else flag
        if _OF_NAMES.search(key) and (found := _IN_NAMES.search(word)):
            word = _IN_NAMES.sub(lambda found: found[1].upper(), word)
            written.unread.append(f"{key}: {found[1].upper()} stands for `{found[0]}`, which is not run")
        name, equals, value = word.partition("=")
        if unknown := _unknown(word):
            written.unread.append(f"{f'--{flag} ' if flag and not is_argument(word) else ''}{word}: {unknown}")
            written.values.pop(flag, None)
        elif word.startswith("--"):
            key = name[2:].replace("-", "_")
            key = RENAMED.get(key, key) if key != "config" else key
            written.values[key], flag = scalar(value) if equals else True, "" if equals else key
        elif is_argument(word) and not (flag and system == "trl"):
            written.values[name.lstrip("+~")], flag = scalar(value), ""
        elif flag and not re.match(r"-[a-zA-Z]", word):
            before = written.values.get(flag, True)
            listed = before if isinstance(before, list) else [] if before is True else [before]
            written.values[flag] = [*listed, scalar(word.rstrip(","))] if listed else scalar(word.rstrip(","))
    return written


def _unknown(word: str) -> str | None:
    """Tells why a word has no known value."""
    if "$(" in word:
        return "the output of a command is not known; set it by hand"
    names = sorted({found[1] or found[2] for found in VARIABLE.finditer(word)} - {"@", "*", "#", "?"})
    return f"variable {', '.join(names)} is not set in the script" if names else None
