# SPDX-License-Identifier: Apache-2.0
"""Reads the keys and values that a file or command of another framework sets. Nothing is run.

Files: YAML with `${key}`, shell scripts (variables, arrays, arithmetic, line continuations, branches, functions),
Python scripts with a `...Config(...)` call or with the command in their docstring."""

from __future__ import annotations

import ast
import operator
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import repeat
from pathlib import Path
from typing import Any

import yaml

from whet.config.compose import flatten
from whet.config.foreign import tables
from whet.config.foreign_python import arguments_of_calls, literal
from whet.errors import ConfigError

_ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
_ARGUMENT = re.compile(r"[+~]{0,2}[\w.@/]+=.*|--\w.*", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(\w+|[@*#?])|\{(\w+)(?:(:?[-=])(.*)|(\[[@*]\]))?\})", re.DOTALL)
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
OF_THE_SHELL = ("HOME", "USER", "PWD")
_TESTS = {"=": operator.eq, "==": operator.eq, "!=": operator.ne}
_TESTS |= {f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
RENAMED = {"model": "model_name_or_path", "config": "config_file_of_keys"}
RENAMED |= {"r": "lora_r", "target_modules": "lora_target_modules"}  # of peft's LoraConfig
UNREAD = ("defaults", "hydra")  # parts of a file that name other files
_HEREDOC = re.compile(r"(?<!<)<<-?\s*(['\"]?)(\w+)\1[^\n]*\n.*?\n\s*\2\b", re.DOTALL)
_FUNCTION = re.compile(
    r"^(?:function\s+)?(\w+)\s*(?:\(\s*\))?\s*\{(.*?(?=\n\})|[^\n]*;\s*)\n?\}", re.MULTILINE | re.DOTALL
)
_RUNS_MODULES = re.compile(r"(^|/)(python[\d.]*|torchrun|accelerate|deepspeed)$")
_LAUNCHERS = re.compile(r"(torch\.distributed|accelerate|deepspeed)\.")
_PROCESSES = re.compile(r"--(?:num[_-]processes|nproc[_-]per[_-]node|num[_-]gpus)[ =](\d+)")


@dataclass
class Written:
    """Values that a file or command sets, by dotted key, and what could not be read."""

    values: dict[str, Any] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)


def read(source: str, system: str) -> Written:
    """Reads a file, or a command in one text.  Raises: ConfigError where `source` is neither or sets nothing."""
    path = Path(source)
    exists = os.path.isfile(path)  # noqa: PTH113  # never raises, for a text that is too long for a name either
    if not exists and not re.search(r"\s", source):
        raise ConfigError(f"{source} does not exist; expected a file, or a command in quotes")
    reader = {".yaml": _of_yaml, ".yml": _of_yaml, ".py": _of_python}.get(path.suffix if exists else "", _of_shell)
    try:
        text = path.read_text(encoding="utf-8") if exists else source
        written = reader(text, system)
        if base := _base(written.values):
            _lay_over(written, base, path if exists else Path("command"), system)
    except ConfigError:
        raise
    except (SyntaxError, ValueError, RecursionError, yaml.YAMLError) as error:
        found = f"cannot be read: {' '.join(str(error).split())}; expected YAML, Python or a shell script, in UTF-8"
        raise ConfigError(f"{source} {found}; correct that place") from error
    if not written.values:
        notes = "".join(f"; {note}" for note in written.unread)
        raise ConfigError(
            f"{source} sets no key of {system}; expected key=value, --key value, YAML or Config(key=value){notes}"
        )
    if system == "trl" and re.search(r"\bRLOO(Config|Trainer)\(|\brloo(\.py)?\s", text):
        written.values["trainer"] = "rloo"
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
            written.values = {**below.values, **written.values}
            written.unread += below.unread
            return
    files = {name: keys for table in tables() if table.system.lower() == system for name, keys in table.files.items()}
    published = files.get(os.path.normpath(base), {})
    written.values = {**published, **written.values}
    instead = "the values of the published file" if published else f"the defaults of {system}"
    written.unread.append(f"{base} is not here: its keys are missing; {instead} stand in their place")


def _of_yaml(text: str, system: str) -> Written:
    found = yaml.safe_load(text)
    if not isinstance(found, dict):
        raise ValueError(f"a {type(found).__name__} instead of keys with values")
    values = {str(key): value for key, value in flatten({k: v for k, v in found.items() if k not in UNREAD})}
    unread = [f"{part}: names other files, whose keys are missing" for part in UNREAD[:1] if part in found]
    return Written({RENAMED.get(key, key): scalar(_resolved(value, values)) for key, value in values.items()}, unread)


def _resolved(value: Any, values: Mapping[str, Any], depth: int = 8) -> Any:
    """Replaces `${key}` by the value of that key, where the file has it."""
    if isinstance(value, list):
        return [_resolved(each, values, depth) for each in value]
    if not isinstance(value, str) or not depth:
        return value
    if (whole := _REFERENCE.fullmatch(value)) and whole[1] in values:
        return _resolved(values[whole[1]], values, depth - 1)
    return _REFERENCE.sub(lambda found: str(_resolved(values.get(found[1], found[0]), values, depth - 1)), value)


def _of_python(text: str, system: str) -> Written:
    """Reads the arguments of calls of ...Config and ...Trainer; without any the docstring's first command."""
    tree = ast.parse(text)
    values, unread = arguments_of_calls(tree)
    written = Written({RENAMED.get(key, key): value for key, value in values.items()}, unread)
    if set(written.values) <= {"model_name_or_path", "reward_funcs"}:
        command = re.search(r"^(accelerate launch|python|trl) .*?(?<!\\)$", ast.get_docstring(tree) or "", re.M | re.S)
        if command:
            of_command = _of_shell(command[0], system)
            return Written({**written.values, **of_command.values}, [*unread, *of_command.unread])
    return written


def _of_shell(text: str, system: str) -> Written:
    """Reads the arguments of the command that has most of them; assignments before it are carried out."""
    shell, programs, launcher, best = _Shell(), Counter[str](), list[str](), list[str]()
    text = _unrolled(text)
    for statement in _statements(text):
        words = shell.run(shell.in_branch(statement))
        start = _start(words)
        programs[" ".join(words[:start])] += 1
        if sum(map(_is_argument, words[start:])) > sum(map(_is_argument, best)):
            launcher, best = words[:start], words[start:]
    written = _arguments(best, system)
    if system == "trl" and (processes := _PROCESSES.search(" ".join(launcher))):
        written.values.setdefault("num_processes", int(processes[1]))
    if launcher and programs[" ".join(launcher)] > 1:
        written.unread.append(f"`{' '.join(launcher)}` is run more than once: the recipe is that of one run")
    undecided = [f"`{each}`" for each in dict.fromkeys(shell.unknown_branches)]
    undecided += sorted({f"`{each}`" for each in re.findall(r"^\s*(for|while)\b", text, re.MULTILINE)})
    if undecided:
        written.unread.append(f"{', '.join(undecided)}: not decided; all assignments in it were carried out, in order")
    return written


def _unrolled(text: str) -> str:
    """The script with each function in the place of its call, `case` as `if`, and loops over one word without `for`."""
    text = _HEREDOC.sub("\n", re.sub(r"\\\r?\n", " ", text))
    text = re.sub(r"\bfor\s+(\w+)\s+in\s+([^\s;$*{`]+)\s*[;\n]\s*do\b", r"\n\1=\2\n", text)
    text = re.sub(r"\bcase\s+(\S+)\s+in\b(.*?)\besac\b", _as_if, text, flags=re.DOTALL)
    for found in reversed(list(_FUNCTION.finditer(text))):
        before, *calls = re.split(rf"(?m)^[ \t]*{found[1]}\b(?!\s*\(|=)(.*)$", text.replace(found[0], "\n"))
        if calls:
            text = before + "".join(map("set -- {}\n{}\n{}".format, calls[::2], repeat(found[2]), calls[1::2]))
    return text


def _as_if(found: re.Match[str]) -> str:
    branches = re.findall(r"\s*\(?([^()]+)\)(.*?)(?:;;|\Z)", found[2], re.DOTALL)
    tests = [f"if case {found[1]} {' '.join(pattern.split('|'))}\nthen\n{body}\n" for pattern, body in branches]
    return "\nel".join(tests) + "\nfi\n"


def _start(words: list[str]) -> int:
    """The place of the first argument of the program: after `python -m MODULE` or FILE.py, `trl COMMAND`, or variables
    of the environment. The words before it belong to launchers (srun, torchrun, accelerate, `ray job submit`)."""
    for place, word in enumerate(words):
        runs_module = word in ("-m", "--module") and any(map(_RUNS_MODULES.search, words[:place]))
        if word.endswith(".py") and not _is_argument(word):
            return place + 1
        if (runs_module or word == "trl") and not any(map(_LAUNCHERS.match, words[place + 1 : place + 2])):
            return place + 2
    return next((place for place, word in enumerate(words) if not re.match(r"[A-Z_][A-Z0-9_]*=", word)), 0)


def _is_argument(word: str) -> bool:
    return _ARGUMENT.fullmatch(word) is not None


def _arguments(words: Iterable[str], system: str) -> Written:
    """Reads `key=value`, `--key=value`, and `--key` with the words after it."""
    written, flag = Written(), ""
    for word in words:
        name, equals, value = word.partition("=")
        if unknown := _unknown(word):
            written.unread.append(f"{f'--{flag} ' if flag and not _is_argument(word) else ''}{word}: {unknown}")
            written.values.pop(flag, None)
        elif word.startswith("--"):
            key = name[2:].replace("-", "_")
            key = RENAMED.get(key, key) if key != "config" else key
            written.values[key], flag = scalar(value) if equals else True, "" if equals else key
        elif _is_argument(word) and not (flag and system == "trl"):
            written.values[name.lstrip("+~")], flag = scalar(value), ""
        elif flag and not re.match(r"-[a-zA-Z]", word):
            before = written.values.get(flag, True)
            listed = before if isinstance(before, list) else [] if before is True else [before]
            written.values[flag] = [*listed, scalar(word.rstrip(","))] if listed else scalar(word.rstrip(","))
    return written


def _unknown(word: str) -> str | None:
    """Tells why a word has no known value."""
    if "$(" in word or "`" in word:
        return "the output of a command is not known; set it by hand"
    names = sorted({found[1] or found[2] for found in _VARIABLE.finditer(word)} - {"@", "*", "#", "?"})
    return f"variable {', '.join(names)} is not set in the script" if names else None


class _Shell:
    """The variables of a script."""

    def __init__(self) -> None:
        self.unknown_branches = list[str]()
        self._branches = list[list[bool | None]]()  # of each `if` around, whether its conditions so far hold
        self._values: dict[str, list[str]] = {name: [os.environ.get(name, f"${name}")] for name in OF_THE_SHELL}

    def run(self, statement: list[str]) -> list[str]:
        """Carries out an assignment; the words of any other statement, with variables replaced."""
        ends = [place for place, word in enumerate(statement) if re.match(r"\d*[<>]", word)]  # of redirections
        declares = ("export", "local", "declare", "readonly", "-a")
        words = [word for word in statement[: min(ends, default=None)] if word not in declares]
        if words[:2] == ["set", "--"] or (words == ["shift"] and "@" in self._values):
            arguments = [each for word in words[2:] for each in self._expand(word)]
            arguments = self._values["@"][1:] if words == ["shift"] else arguments
            self._values |= {"@": arguments, **{str(place): arguments[place - 1 : place] for place in range(1, 10)}}
            return []
        if words and (found := _ASSIGNMENT.fullmatch(words[0])) and words[1:2] == ["("]:
            before = self._values.get(found[1], []) if found[2] else []
            self._values[found[1]] = before + [e for word in words[2:] if word != ")" for e in self._expand(word)]
            return []
        if words and all(_ASSIGNMENT.fullmatch(word) for word in words):
            for word in words:
                name, _, value = word.partition("=")
                name, more = name.rstrip("+"), name.endswith("+")
                text = " ".join(self._expand(f'"{value}"' if value[:1] not in "\"'" else value, whole=True))
                self._values[name] = [(self._values.get(name, [""])[0] if more else "") + text]
            return []
        return [each for word in words for each in self._expand(word)]

    def in_branch(self, statement: list[str]) -> list[str]:
        """The statement without `if`, `then` or `else`; nothing in a branch that is not taken. Branches of a condition
        that is not known are all taken."""
        first = statement[0]
        if first == "if" or (first in ("elif", "else") and self._branches):
            holds = first == "else" or self._test(statement[1:])
            self._branches.append([*([] if first == "if" else self._branches.pop()), holds])
            if holds is None:
                shown = statement[1:3] if statement[1] == "case" else ["if", *statement[1:]]
                self.unknown_branches.append(" ".join(shown))
        elif first == "fi" and self._branches:
            self._branches.pop()
        taken = all(each[-1] is not False and True not in each[:-1] for each in self._branches)
        rest = statement[1:] if first in ("then", "else", "do") else statement
        return rest if taken and first not in ("if", "elif", "fi") else []

    def _test(self, words: list[str]) -> bool | None:
        """Tells whether a comparison of texts or whole numbers holds; None for anything else."""
        texts = [self._value(word.strip("\"'")) for word in words[1 : None if words[:1] == ["case"] else -1]]
        if words[:1] == ["case"]:
            return None if "$" in texts[0] else any(fnmatchcase(texts[0], each) for each in texts[1:])
        if words[:1] not in (["["], ["[["]) or words[-1] not in ("]", "]]") or set("$*") & {*"".join(texts)}:
            return None
        if len(texts) == 2 and texts[0] in ("-z", "-n"):
            return (texts[0] == "-n") == bool(texts[1])
        if len(texts) != 3 or texts[1] not in _TESTS:
            return None
        left, name, right = texts
        try:
            return bool(_TESTS[name](*((int(left), int(right)) if name[0] == "-" else (left, right))))
        except ValueError:
            return None

    def _expand(self, word: str, whole: bool = False) -> list[str]:
        """The words that a word with quotes and variables stands for; `whole`: not split at spaces."""
        parts, place = [""], 0
        while place < len(word):
            char = word[place]
            if char == "'":
                end = word.index("'", place + 1)
                parts[-1] += word[place + 1 : end]
                place = end + 1
            elif char == '"':
                end = _closing_quote(word, place)
                if word[place:end] in ('"$@', '"$*'):
                    parts = [*parts[:-1], *self._values.get("@", []), ""]
                elif array := re.fullmatch(r'"\$\{(\w+)\[[@*]\]\}', word[place:end]):
                    parts = [*self._values.get(array[1], []), ""]
                else:
                    parts[-1] += self._value(word[place + 1 : end]).replace('\\"', '"')
                place = end + 1
            elif char == "$":
                end = _end_of_variable(word, place)
                value = self._value(word[place:end])
                pieces = [value] if whole or value.startswith("$") else value.split() or [""]
                parts[-1] += pieces[0]
                parts += pieces[1:]
                place = end
            else:
                place += 2 if char == "\\" else 1
                parts[-1] += word[place - 1]
        return [part for part in parts if part]

    def _value(self, text: str) -> str:
        """Replaces the variables and the arithmetic of a text; what is not known stays."""
        text = re.sub(r"\$\(pwd\)|`pwd`", "$PWD", text)
        text = re.sub(r"\$\(\((.*?)\)\)(?!\))", lambda found: self._arithmetic(found[1]) or found[0], text)

        def replaced(found: re.Match[str]) -> str:
            name, sign, otherwise = found[1] or found[2], found[3], found[4]
            if name in ("@", "*", "#", "?"):
                return " ".join(self._values.get("@", [])) if name in "@*" else ""
            value = " ".join(self._values.get(name, []))
            if (not value if (sign or "").startswith(":") else name not in self._values) and sign:
                quoted = otherwise if otherwise[:1] in ("'", '"') else f'"{otherwise}"'
                return " ".join(self._expand(quoted, whole=True))
            return value if name in self._values else found[0]

        return _VARIABLE.sub(replaced, text)

    def _arithmetic(self, text: str) -> str | None:
        """The value of whole numbers and variables under + - * / %; None for anything else."""
        name = re.compile(r"\$?\{?\b([A-Za-z_]\w*)\b\}?")
        plain = name.sub(lambda found: " ".join(self._values.get(found[1], [found[0]])), text)
        try:
            return str(literal(ast.parse(plain.strip().replace("/", "//"), mode="eval").body, {}))
        except (SyntaxError, ValueError, TypeError, ZeroDivisionError):
            return None


def _closing_quote(text: str, start: int) -> int:
    place = start + 1
    while place < len(text) and text[place] != '"':
        place = _end_of_variable(text, place) if text[place] == "$" else place + 1 + (text[place] == "\\")
    return place


def _end_of_variable(text: str, start: int) -> int:
    """The place after a `$name`, `${...}` or `$(...)`."""
    if text[start + 1 : start + 2] not in ("{", "("):
        found = re.compile(r"\$(\w+|[@*#?])?").match(text, start)
        assert found is not None
        return found.end()
    opening, depth = text[start + 1], 0
    for place in range(start + 1, len(text)):
        depth += (text[place] == opening) - (text[place] == {"{": "}", "(": ")"}[opening])
        if not depth:
            return place + 1
    return len(text)


def _statements(text: str) -> Iterator[list[str]]:
    """The statements of a script as lists of words, quotes and variables as they are written."""
    words, word, place, in_array = list[str](), "", 0, False
    text += "\n"
    while place < len(text):
        char, end = text[place], place + 1
        if char == "#" and not word:
            end = text.index("\n", place)
        elif char == "'":
            end = text.find("'", place + 1) + 1 or len(text)
        elif char == '"':
            end = _closing_quote(text, place) + 1
        elif char == "`":
            end = text.find("`", place + 1) + 1 or len(text)
        elif char == "$":
            end = _end_of_variable(text, place)
        elif char == "\\":
            end = place + 2
        if char in " \t\n;&|()" or (char == "#" and not word):
            if word:
                words.append(word)
            word = ""
            if char == "(" and words and words[-1].endswith("="):
                in_array = True
            if char in "()":
                words.append(char)
            if char == ")" or (char in "\n;&|" and not in_array):
                in_array = False
                if words:
                    yield words
                words = []
        else:
            word += text[place:end]
        place = end
    if word or in_array:
        raise SyntaxError(f"a quote or bracket is not closed, in {' '.join([*words, word])[:60]!r}")
