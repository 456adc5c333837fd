# SPDX-License-Identifier: Apache-2.0
"""Reads the keys and values that a file or command of another framework sets. Nothing is run.

Files: YAML with `${key}`, shell scripts (variables, arrays, arithmetic, line continuations, branches), Python scripts
with a `...Config(...)` call or with the command in their docstring."""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from whet.config.compose import flatten
from whet.errors import ConfigError

_ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
_ARGUMENT = re.compile(r"[+~]{0,2}[\w.@/]+=.*|--\w.*", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(\w+|[@*#?])|\{(\w+)(?:(:?[-=])(.*)|(\[[@*]\]))?\})", re.DOTALL)
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
OF_THE_SHELL = ("HOME", "USER", "PWD")
_TESTS = {"=": operator.eq, "==": operator.eq, "!=": operator.ne}
_TESTS |= {f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
RENAMED = {"model": "model_name_or_path", "config": "config_file_of_keys"}
UNREAD = ("defaults", "hydra")  # parts of a file that name other files


@dataclass
class Written:
    """Values that a file or command sets, by dotted key, and what could not be read."""

    values: dict[str, Any] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)


def read(source: str, system: str) -> Written:
    """Reads a file, or a command in one text.  Raises: ConfigError where `source` is neither or sets nothing."""
    path = Path(source)
    is_file = len(source) < 4096 and "\n" not in source and path.is_file()
    if not is_file and not re.search(r"\s", source):
        raise ConfigError(f"{source} does not exist; expected a file, or a command in quotes")
    text = path.read_text(encoding="utf-8") if is_file else source
    if is_file and path.suffix in (".yaml", ".yml"):
        written = _of_yaml(text, source)
    elif is_file and path.suffix == ".py":
        written = _of_python(text)
    else:
        written = _of_shell(text)
    if system == "trl" and re.search(r"\bRLOO(Config|Trainer)\(|\brloo(\.py)?\s", text):
        written.values["trainer"] = "rloo"
    if base := written.values.pop("config", None):
        _lay_over(written, str(base), path if is_file else Path("command"), system)
    if not written.values:
        raise ConfigError(
            f"{source} sets no key of {system}; expected key=value, --key value, YAML or Config(key=value)"
        )
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
        try:
            return kind(value)
        except ValueError:
            continue
    if value[:1] in ("[", "{"):
        try:
            return scalar(yaml.safe_load(value))
        except yaml.YAMLError:
            return value
    words = {"true": True, "false": False, "null": None, "none": "none", "~": None, "": None}
    if value == "None":
        return None
    plain = value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
    return words.get(value.lower(), plain)


def _lay_over(written: Written, base: str, script: Path, system: str) -> None:
    """Adds the keys of the file that a command names, searched beside the script and above it."""
    for folder in (Path(), *script.absolute().parents):
        if (folder / base).is_file():
            below = _of_yaml((folder / base).read_text(encoding="utf-8"), base)
            written.values = {**below.values, **written.values}
            written.unread += below.unread
            return
    written.unread.append(f"{base} is not here: its keys are missing; the defaults of {system} stand in their place")


def _of_yaml(text: str, name: str) -> Written:
    found = yaml.safe_load(text)
    if not isinstance(found, dict):
        raise ConfigError(f"{name} has {type(found).__name__}, expected keys with values")
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


def _of_python(text: str) -> Written:
    """Reads the literal arguments of calls of ...Config and ...Trainer; without any the docstring's first command."""
    written, tree = Written(), ast.parse(text)
    for call in ast.walk(tree):
        name = ast.unparse(call.func).rpartition(".")[2] if isinstance(call, ast.Call) else ""
        if not isinstance(call, ast.Call) or not name.endswith(("Config", "Trainer")):
            continue
        for each in call.keywords:
            if each.arg is None or (name.endswith("Trainer") and each.arg not in ("model", "reward_funcs")):
                continue
            key = RENAMED.get(each.arg, each.arg)
            try:
                written.values[key] = ast.literal_eval(each.value)
            except ValueError:
                written.unread.append(f"{key}={ast.unparse(each.value)} is not a literal: set it by hand")
    if set(written.values) <= {"model_name_or_path", "reward_funcs"}:
        command = re.search(r"^(accelerate launch|python|trl) .*?(?<!\\)$", ast.get_docstring(tree) or "", re.M | re.S)
        if command:
            of_command = _of_shell(command[0])
            return Written(of_command.values, [*written.unread, *of_command.unread])
    return written


def _of_shell(text: str) -> Written:
    """Reads the arguments of the statement that has most of them; assignments before it are carried out."""
    shell, best = _Shell(), list[str]()
    for statement in _statements(text):
        words = shell.run(shell.in_branch(statement))
        if sum(1 for word in words if _ARGUMENT.fullmatch(word)) > sum(1 for word in best if _ARGUMENT.fullmatch(word)):
            best = words
    written = Written()
    for name in shell.missing(best):
        left = [word for word in best if re.search(rf"\$\{{?{name}\b", word)]
        written.unread.append(f"{', '.join(left)}: variable {name} is not set in the script")
        best = [word for word in best if word not in left]
    undecided = [f"`if {each}`" for each in shell.unknown_branches]
    undecided += sorted({f"`{each}`" for each in re.findall(r"^\s*(case|for|while)\b", text, re.MULTILINE)})
    if undecided:
        written.unread.append(f"{', '.join(undecided)}: not decided; all assignments in it were carried out, in order")
    flag = ""
    for word in best:
        if word.startswith("--"):
            flag, _, value = word[2:].replace("-", "_").partition("=") if "=" in word else (word[2:], "", "")
            flag = RENAMED.get(flag, flag) if flag != "config" else flag
            written.values[flag.replace("-", "_")] = scalar(value) if "=" in word else True
        elif _ARGUMENT.fullmatch(word) and not flag:
            key, _, value = word.lstrip("+~").partition("=")
            written.values[key] = scalar(value)
        elif flag and not word.endswith(".py"):
            before, each = written.values[flag], scalar(word.rstrip(","))
            written.values[flag] = (
                each if before is True else [*(before if isinstance(before, list) else [before]), each]
            )
        elif word.endswith(".py"):
            flag = ""
    return written


class _Shell:
    """The variables of a script."""

    def __init__(self) -> None:
        self.unknown_branches = list[str]()
        self._branches = list[list[bool | None]]()  # of each `if` around, whether its conditions so far hold
        self._values: dict[str, list[str]] = {name: [os.environ.get(name, f"${name}")] for name in OF_THE_SHELL}

    def run(self, statement: list[str]) -> list[str]:
        """Carries out an assignment; the words of any other statement, with variables replaced."""
        words = [word for word in statement if word not in ("export", "local", "declare", "-a")]
        if words and (found := _ASSIGNMENT.fullmatch(words[0])) and words[1:2] == ["("]:
            self._values[found[1]] = [each for word in words[2:] if word != ")" for each in self._expand(word)]
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
                self.unknown_branches.append(" ".join(statement[1:]))
        elif first == "fi" and self._branches:
            self._branches.pop()
        taken = all(each[-1] is not False and True not in each[:-1] for each in self._branches)
        rest = statement[1:] if first in ("then", "else", "do") else statement
        return rest if taken and first not in ("if", "elif", "fi") else []

    def _test(self, words: list[str]) -> bool | None:
        """Tells whether a comparison of texts or whole numbers holds; None for anything else."""
        texts = [self._value(word.strip("\"'")) for word in words[1:-1]]
        if (
            words[:1] not in (["["], ["[["])
            or words[-1] not in ("]", "]]")
            or any(set("$*") & {*each} for each in texts)
        ):
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

    def missing(self, words: list[str]) -> list[str]:
        """Names of variables that are left in the words."""
        return sorted({found[1] or found[2] for word in words for found in _VARIABLE.finditer(word)} - {"@", "*"})

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
                    parts = [*parts[:-1], ""]
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
        text = re.sub(r"\$\(\((.*?)\)\)(?!\))", lambda found: self._arithmetic(found[1]) or found[0], text)

        def replaced(found: re.Match[str]) -> str:
            name, sign, otherwise = found[1] or found[2], found[3], found[4]
            if name in ("@", "*", "#", "?"):
                return ""
            value = " ".join(self._values.get(name, []))
            if (not value if (sign or "").startswith(":") else name not in self._values) and sign:
                value = " ".join(
                    self._expand(f'"{otherwise}"' if otherwise[:1] not in "\"'" else otherwise, whole=True)
                )
                return value
            return value if name in self._values else found[0]

        return _VARIABLE.sub(replaced, text)

    def _arithmetic(self, text: str) -> str | None:
        """The value of whole numbers and variables under + - * / %; None for anything else."""
        plain = re.sub(
            r"\$?\{?\b([A-Za-z_]\w*)\b\}?", lambda name: " ".join(self._values.get(name[1], [name[0]])), text
        )
        try:
            return str(_number(ast.parse(plain.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return None


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp):
        left, right = _number(node.left), _number(node.right)
        results = {ast.Add: left + right, ast.Sub: left - right, ast.Mult: left * right}
        if type(node.op) in results:
            return results[type(node.op)]
        if isinstance(node.op, (ast.Div, ast.FloorDiv, ast.Mod)):
            return left % right if isinstance(node.op, ast.Mod) else left // right
    raise ValueError("not a number")


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
    text = text.replace("\\\r\n", " ").replace("\\\n", " ") + "\n"
    while place < len(text):
        char, end = text[place], place + 1
        if char == "#" and not word:
            end = text.index("\n", place)
        elif char == "'":
            end = text.find("'", place + 1) + 1 or len(text)
        elif char == '"':
            end = _closing_quote(text, place) + 1
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
