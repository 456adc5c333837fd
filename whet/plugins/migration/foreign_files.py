# SPDX-License-Identifier: Apache-2.0
"""Reads the keys and values that a file or command of another framework sets. It runs no code.

It reads YAML with `${key}` and `defaults`, shell scripts, and Python scripts and notebooks with a `...Config(...)` call
or a command in the docstring. A file may be malicious, so the reader limits its size and the work it causes."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import yaml

from whet.config.compose import MAX_BYTES, check_document, flatten
from whet.config.section import Values
from whet.errors import ConfigError
from whet.limits import bounded, cause
from whet.options import as_list
from whet.plugins.migration.foreign import tables
from whet.plugins.migration.foreign_python import Budget, TooMuch, arguments_of_calls, attributes_of_configs
from whet.plugins.migration.foreign_shell import Launch, Shell, Undecided, is_argument, start_of
from whet.plugins.migration.foreign_shell_language import OTHER, UNKNOWN, is_known, unset_variables

_PROGRAM = re.compile(r"\$\((date|git|hostname|id|mktemp|uuidgen|whoami)\b")
_OF_NAMES = re.compile(r"(name|dir|path|folder|group)$")  # keys whose values may hold the output of such a program
_REFERENCE = re.compile(r"\$\{(?:oc\.(?:select|env):)?([\w.]+)(?:,([^{}]*))?\}")  # name, default
RENAMED = {"model": "model_name_or_path", "config": "config_file_of_keys"}
RENAMED |= {"r": "lora_r", "target_modules": "lora_target_modules"}  # of peft's LoraConfig
WORDS = {"true": True, "false": False, "null": None, "None": None, "~": None, "": None}
MAX_SWEEP = 100  # turns of a loop around a command that are read
MAX_RUNS = 100  # ways through the branches of a script that are tried
_WAYS = f"there are more than {MAX_RUNS} ways through its branches; --set a variable for some of them"
UNREAD = ("defaults", "hydra")  # parts of a file that are not keys
WITH_FLAGS = ("trl", "openrlhf", "slime")
_UNKNOWN_OUTPUT = "the output of a command is not known; set it by hand"
_OF_LAUNCHERS = (r"num[_-]processes", r"(?:nproc[_-]per[_-]node|num[_-]gpus)", r"(?:nnodes|num[_-]nodes)")
_PROCESSES = [re.compile(rf"--{each}[ =](\d+)(?![\d:])") for each in _OF_LAUNCHERS]  # of all nodes, of one; nodes
_ACCELERATE = re.compile(r"--config_file[ =](\S+)")


@dataclass
class Written:
    """The values that a file or command sets, by dotted key, and notes about parts that could not be read."""

    values: Values = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    loops: dict[str, list[Values]] = field(default_factory=dict)  # values of a loop's later turns
    # By the name that a branch depends on: for each value that it may have, the values of the keys.
    branches: dict[str, dict[str, Values]] = field(default_factory=dict)
    program: str = field(default="", compare=False)  # the words before the arguments, or the classes of a Python script
    trainer: str = field(default="", compare=False)  # the trainer that the program or its keys select

    def every(self) -> list[Values]:
        """Returns all alternatives of the values: one for every loop iteration and every branch."""
        found = [*chain(*self.loops.values()), *chain(*(ways.values() for ways in self.branches.values()))]
        return [self.values, *(each for each in found if each is not self.values)]


def read(source: str, system: str, fixed: Mapping[str, str] | None = None) -> Written:
    """Reads a file, or a command given as one text. `fixed` sets variables of a script; the script cannot change them.

    Raises: ConfigError if `source` is neither, sets no key, or exceeds a limit."""
    # isfile never raises, for a text that is too long for a name either
    path = Path(source) if os.path.isfile(source) else None  # noqa: PTH113
    if path is None and not re.search(r"\s", source):
        raise ConfigError(source, "does not exist", "a file, or a command in quotes", "correct the path")
    shown = "the command" if path is None else source
    try:
        with bounded():
            written = _read(path, source, system, fixed or {})
            repr(written)  # ValueError for an integer of more digits than Python prints
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise ConfigError(f"{shown}{place}", str(error.problem), "YAML", "correct it there") from error
    except (TooMuch, TimeoutError, MemoryError) as error:
        instead = "give a shorter one, or the resolved config that the framework prints (`--cfg job`), as YAML"
        raise ConfigError(shown, f"cannot be read within limits: {cause(error)}", change=instead) from error
    except (SyntaxError, ValueError, AttributeError, TypeError, RecursionError, yaml.YAMLError) as error:
        found = f"cannot be read: {' '.join(str(error).split())}"
        raise ConfigError(shown, found, "YAML, Python or a shell script, in UTF-8", "correct that place") from error
    if not written.values:
        forms = "key=value, --key value, YAML or Config(key=value)"
        raise ConfigError(source[:200], f"sets no key of {system}", forms, "; ".join(written.unread))
    return written


def _read(path: Path | None, source: str, system: str, fixed: Mapping[str, str]) -> Written:
    if len(source) > MAX_BYTES:
        raise TooMuch(f"it has more than {MAX_BYTES:,} bytes")
    suffix, text = ("", source) if path is None else (path.suffix, _text_of(path))
    if path is not None and suffix in (".yaml", ".yml", ".json"):
        written = replace(_of_yaml(path), program=path.name)
    elif suffix == ".py":
        written = _of_python(text, system, source)
    elif suffix == ".ipynb":
        cells = [each for each in json.loads(text).get("cells", []) if each.get("cell_type") == "code"]
        written = _of_python("\n".join("".join(each.get("source", "")) for each in cells), system)
    else:
        written = _of_shell(text, system, fixed, None if path is None else source)
    bases = [_base(values) for values in written.every()]
    if bases[0]:
        _lay_over(written, bases[0], path or Path("command"), system)
    if set(bases) - {bases[0]}:
        written.unread.append(f"a loop or a branch names several base files: all get the values of {bases[0]}")
    return written


def scalar(value: object) -> object:
    """Parses a text as a value by the rules of Hydra and YAML 1.2: numbers, true, null, lists, mappings."""
    match value:
        case dict():
            return {key: scalar(each) for key, each in value.items()}
        case list():
            return [scalar(each) for each in value]
        case str():
            return _scalar(value)
    return value


def _scalar(value: str) -> object:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(value)
    if value[:1] in ("[", "{"):
        with suppress(yaml.YAMLError):
            return scalar(yaml.safe_load(value))
    plain = value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
    return WORDS.get(value if value == "None" else value.lower(), plain)


def _base(values: Values) -> str | None:
    """Removes and returns the name of a base file of keys: `config`, or Hydra's `config_path` and `config_name`."""
    folder, name, base = (values.pop(key, None) for key in ("config_path", "config_name", "config"))
    return str(Path(str(folder or ""), str(name).removesuffix(".yaml") + ".yaml")) if name else base and str(base)


def _lay_over(written: Written, base: str, script: Path, system: str) -> None:
    """Adds the keys of the file `base`, from the working folder, the script's folder or above, or as published."""
    for folder in (Path(), *script.absolute().parents):
        if os.path.isfile(folder / base):  # noqa: PTH113
            below = _of_yaml(folder / base)
            _below(written, below.values)
            written.unread += below.unread
            return
    published = _published(base, system)
    _below(written, published)
    instead = "the values of the published file" if published else f"the defaults of {system}"
    written.unread.append(f"{base} is not here: its keys are missing; {instead} stand in their place")


def _published(name: str, system: str) -> Mapping[str, object]:
    """Returns the keys of a framework's published file, found by the end of its path."""
    files = {file: keys for table in tables() if table.system.lower() == system for file, keys in table.files.items()}
    return next((keys for file, keys in files.items() if f"/{os.path.normpath(name)}".endswith(f"/{file}")), {})


def _below(written: Written, values: Mapping[str, object]) -> None:
    """Adds values for keys that the command does not set, in every loop iteration and every branch."""
    for each in written.every():
        own = each.copy()
        each.clear()
        each |= {**values, **own}


def _text_of(file: Path) -> str:
    if file.stat().st_size > MAX_BYTES:
        raise TooMuch(f"{file} has more than {MAX_BYTES:,} bytes")
    return file.read_text(encoding="utf-8")


def _of_yaml(file: Path, depth: int = 0) -> Written:
    """Reads a YAML file, and the files that its `defaults` name, which are beside the file or below its folder."""
    text = _text_of(file)
    check_document(text, str(file))
    found = yaml.safe_load(text)
    if not isinstance(found, dict):
        raise ValueError(f"a {type(found).__name__} instead of keys with values")
    values, unread, entries = Values(), list[str](), found.get("defaults") or []
    for entry in as_list(entries):
        below, note = _default(entry, file.parent, depth)
        values |= below
        unread += note
    own = flatten({k: v for k, v in found.items() if k not in UNREAD})
    values |= {str(key): value for key, value in own if value != "???"}  # Hydra's mark of a value that is missing
    if depth:
        return Written(values, unread)
    resolved, budget = Values(), Budget()
    for key, value in values.items():
        each = _resolved(value, values, key, budget)
        below = dict(flatten({key: each})) if isinstance(each, dict) and each else {key: each}
        resolved |= {RENAMED.get(name, name): scalar(inner) for name, inner in below.items()}
    return Written(resolved, unread)


def _default(entry: object, folder: Path, depth: int) -> tuple[Values, list[str]]:
    """Reads a file that `defaults` names as NAME, NAME@PLACE or GROUP: NAME. If it is missing, returns a note."""
    group, name = next(iter(entry.items())) if isinstance(entry, dict) and entry else ("", entry)
    if name in ("_self_", None) or str(group).startswith(("override", "/hydra", "hydra/")):
        return {}, []
    group, _, place = str(group if isinstance(entry, dict) else "").removeprefix("optional ").partition("@")
    name, _, named = str(name).partition("@")
    file = Path(str(group).lstrip("/"), name.removesuffix(".yaml") + ".yaml")
    place = re.sub("_here_|_global_", "", named or place) if named or place else group.replace("/", ".")
    if depth > 5 or not os.path.isfile(folder / file):  # noqa: PTH113
        return {}, [f"defaults: {file} is not here, and its keys are missing"]
    below = _of_yaml(folder / file, depth + 1)
    return {f"{place}.{key}" if place else key: value for key, value in below.values.items()}, below.unread


def _resolved(value: object, values: Mapping[str, object], key: str, budget: Budget, depth: int = 8) -> object:
    """Resolves `${key}` to the value of `key`, or to the keys below it; `${oc.select:key,default}` falls back to its
    default. `${oc.env:NAME,default}` always gives the default, since environment variables may be secrets."""
    if isinstance(value, list):
        return [_resolved(each, values, key, budget, depth) for each in value]
    if not isinstance(value, str) or "${" not in value or not depth:
        return value

    def of(found: re.Match[str]) -> object:
        budget.step()
        name = found[1].lstrip(".")
        if dots := len(found[1]) - len(name):  # beside this key, or in sections around it
            name = ".".join([*key.split(".")[:-dots], name])
        if name in values:
            return _resolved(values[name], values, name, budget, depth - 1)
        if below := [each for each in values if each.startswith(f"{name}.")]:
            budget.step(len(values))
            return {each[len(name) + 1 :]: _resolved(values[each], values, each, budget, depth - 1) for each in below}
        return found[0] if found[2] is None else found[2].strip()

    if whole := _REFERENCE.fullmatch(value):
        return of(whole)
    replaced = budget.text(_REFERENCE.sub(lambda found: str(of(found)), value))  # of nested ones the innermost
    return value if replaced == value else _resolved(replaced, values, key, budget, depth - 1)


def _of_python(text: str, system: str, path: str = "") -> Written:
    """Reads the arguments of ...Config and ...Trainer calls; without such calls, the first command in the docstring.
    Assignments to attributes of configs override the arguments."""
    tree = ast.parse(re.sub(r"(?m)^[ \t]*[!%].*$", "", text))  # commands of a notebook
    values, unread, program = arguments_of_calls(tree, path)
    written = Written(_renamed(values), unread)
    later, not_read = attributes_of_configs(tree)
    if set(written.values) <= {"model_name_or_path", "reward_funcs", "tools", "environment_factory"}:
        command = re.search(r"^(accelerate launch|python|trl) .*?(?<!\\)$", ast.get_docstring(tree) or "", re.M | re.S)
        if command:
            of_command = _of_shell(command[0], system, {})
            program = f"{program} {of_command.program}".strip()
            written = Written({**written.values, **of_command.values}, [*unread, *of_command.unread])
    return Written({**written.values, **_renamed(later)}, [*written.unread, *not_read], program=program)


def _renamed(values: Mapping[str, object]) -> Values:
    return {RENAMED.get(key, key): value for key, value in values.items()}


def _of_shell(text: str, system: str, fixed: Mapping[str, str], script: str | None = None) -> Written:
    """Reads the arguments of the script's command with the most arguments. Also reads them in later iterations of loops
    around the command, and in each alternative of a branch whose condition is unknown."""
    first = _run(text, script, fixed, {})
    if first is None:
        return Written()
    shell, assumed, open_branches, main = first
    written, launches = _arguments_of(main.words, system), shell.launches
    program = main.words[: start_of(main.words)]
    if sum(each.words[: len(program)] == program and each.turns == main.turns for each in launches if program) > 1:
        written.unread.append(f"`{written.program}` is run more than once: the recipe is that of one run")
    for loop, _ in main.turns:
        others = [turn for turn in main.turns if turn[0] != loop]
        same = [each for each in launches if each.place == main.place]
        turns = [each.words for each in same if [turn for turn in each.turns if turn[0] != loop] == others]
        if len(turns) > MAX_SWEEP:
            name = " ".join(loop.split()[:2])
            written.unread.append(f"`{name}` has {len(turns):,} turns, of which the first {MAX_SWEEP} were read")
        if turns := turns[1:MAX_SWEEP]:
            label = " ".join(loop.split()[: 3 + MAX_SWEEP])
            written.loops[label] = [_arguments_of(words, system).values for words in turns]
    if loops := [f"`{each}`" for each in shell.loops]:
        written.unread.append(f"{', '.join(loops)}: not decided; all assignments in it were carried out, in order")
    written.unread += [f"source {each}: variables that this file sets are not read" for each in shell.sources]
    if sum(map(len, open_branches.values())) > MAX_RUNS:
        raise TooMuch(_WAYS)
    for name, candidates in open_branches.items():
        ways = {each: _run(text, script, fixed, assumed | {name: each}) for each in candidates if each != assumed[name]}
        taken = {each: _arguments_of(way[3].words, system).values for each, way in ways.items() if way is not None}
        written.branches[name] = {assumed[name]: written.values, **taken}
    return written


def _run(
    text: str, script: str | None, fixed: Mapping[str, str], assumed: Mapping[str, str]
) -> tuple[Shell, dict[str, str], dict[str, tuple[str, ...]], Launch] | None:
    """Interprets a script, with candidates for unknown values, until a program starts; None if no program does. Returns
    the script's state, the candidates used, all candidates, and the program with the most arguments."""
    waiting, found = [dict(assumed)], dict[str, tuple[str, ...]]()
    for _ in range(MAX_RUNS):
        if not waiting:
            return None
        tried = waiting.pop()
        shell = Shell(script, fixed, tried)
        try:
            shell.carry_out(text)
        except Undecided as branch:
            if branch.name in tried:
                raise TooMuch(f"the branches on {branch.name} cannot be decided") from branch
            found[branch.name] = branch.candidates
            waiting += [tried | {branch.name: each} for each in reversed(branch.candidates)]
            continue
        programs = [each for each in shell.launches if any(map(is_argument, each.words[start_of(each.words) :]))]
        if programs:
            main = max(programs, key=lambda each: sum(map(is_argument, each.words[start_of(each.words) :])))
            return shell, tried, {name: found[name] for name in tried if name in found}, main
    raise TooMuch(_WAYS)


def _arguments_of(words: list[str], system: str) -> Written:
    """Reads the arguments of a program, and the number of processes that its launcher starts."""
    start = start_of(words)
    written = _arguments(words[start:], system)
    launcher = written.program = " ".join(words[:start])
    if system == "trl" and (file := _ACCELERATE.search(launcher)):
        written.values = {**_published(file[1], system), **written.values}
    all_processes, of_node, nodes = (int(found[1]) if (found := each.search(launcher)) else 0 for each in _PROCESSES)
    if system == "trl" and (total := all_processes or of_node * (nodes or 1)):
        written.values["num_processes"] = total
    if of_node and "sft_trainer" in launcher:
        written.values = {"trainer.n_gpus_per_node": of_node, "trainer.nnodes": nodes or 1, **written.values}
    return written


def _arguments(words: Iterable[str], system: str) -> Written:
    """Reads `key=value`, `--key=value`, and `--key` followed by its values."""
    written, flag = Written(), ""
    for given in words:
        key = given.partition("=")[0] if is_argument(given) else flag
        unknown = UNKNOWN.findall(given)
        named = {each: found[1].upper() for each in unknown if (found := _PROGRAM.match(each))}
        word = UNKNOWN.sub(lambda found: found[1], given).replace(OTHER, "?")
        if unknown and len(named) == len(set(unknown)) and _OF_NAMES.search(key):
            for each, short in named.items():
                given = given.replace(f"\ue000{each}\ue001", short)
            word = given
            written.unread += [f"{key}: {name} stands for `{each}`, which is not run" for each, name in named.items()]
        elif not is_known(given):
            is_value = written.values.get(flag) is True and not is_argument(word) and not re.search(r"\[[@*]\]", word)
            prefix = f"--{flag} " if is_value else ""
            names = unset_variables(given)
            told = f"variable {', '.join(names)} is not set in the script" if names else _UNKNOWN_OUTPUT
            written.unread.append(f"{prefix}{word}: {told}")
            flag = flag if not is_value else written.values.pop(flag) and ""
            continue
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            key = name[2:].replace("-", "_")
            key = RENAMED.get(key, key) if key != "config" else key
            written.values[key], flag = scalar(value) if equals else True, "" if equals else key
        elif is_argument(word) and not (flag and system in WITH_FLAGS):
            written.values[name.lstrip("+~")], flag = scalar(value), ""
        elif flag and not re.match(r"-[a-zA-Z]", word):
            before = written.values.get(flag, True)
            listed = [] if before is True else as_list(before)
            written.values[flag] = [*listed, scalar(word.rstrip(","))] if listed else scalar(word.rstrip(","))
    return written
