# SPDX-License-Identifier: Apache-2.0
"""Reads shell scripts without running them: variables, arrays, arithmetic, branches, loops, functions, and the output
of programs that only change a text (basename, dirname, realpath, seq)."""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import repeat
from pathlib import Path

from whet.config.foreign_python import literal

_ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
_ARGUMENT = re.compile(r"[+~]{0,2}[\w.@/]+=.*|--\w.*", re.DOTALL)
VARIABLE = re.compile(r"\$(?:(\w+|[@*#?])|\{(\w+)(?:(:?[-=])(.*)|(\[[@*]\]))?\})", re.DOTALL)
_OUTPUT = re.compile(r"\$\(([^()]*)\)")
_DECLARES = ("export", "local", "declare", "readonly", "-a")
MAX_TURNS = 10_000  # of the loops of a script
OF_THE_SHELL = ("HOME", "USER", "PWD")
_TESTS = {"=": operator.eq, "==": operator.eq, "!=": operator.ne}
_TESTS |= {f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_HEREDOC = re.compile(r"(?<!<)<<-?\s*(['\"]?)(\w+)\1[^\n]*\n.*?\n\s*\2\b", re.DOTALL)
_FUNCTION = re.compile(
    r"^(?:function\s+)?(\w+)\s*(?:\(\s*\))?\s*\{(.*?(?=\n\})|[^\n]*;\s*)\n?\}", re.MULTILINE | re.DOTALL
)
_RUNS_MODULES = re.compile(r"(^|/)(python[\d.]*|torchrun|accelerate|deepspeed)$")
_LAUNCHERS = re.compile(r"(torch\.distributed|accelerate|deepspeed)\.")


def unrolled(text: str) -> str:
    """The script with functions in the place of calls, `if` of `case`, $(...) of backquotes, and `seq` of {1..3}."""
    text = _HEREDOC.sub("\n", re.sub(r"\\\r?\n", " ", text))
    text = re.sub(r"`([^`\n]*)`", r"$(\1)", text)
    text = re.sub(r"(?<=\s)\{(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?\}", r"$(seq \1 \3 \2)", text)
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


def start_of(words: list[str]) -> int:
    """The place of the first argument of the program: after `python -m MODULE` or FILE.py, `trl COMMAND`, or variables
    of the environment. The words before it belong to launchers (srun, torchrun, accelerate, `ray job submit`)."""
    for place, word in enumerate(words):
        runs_module = word in ("-m", "--module") and any(map(_RUNS_MODULES.search, words[:place]))
        if word.endswith(".py") and not is_argument(word):
            return place + 1
        if (runs_module or word == "trl") and not any(map(_LAUNCHERS.match, words[place + 1 : place + 2])):
            return place + 2
    return next((place for place, word in enumerate(words) if not re.match(r"[A-Z_][A-Z0-9_]*=", word)), 0)


def is_argument(word: str) -> bool:
    """Tells whether a word is `key=value` or a flag."""
    return _ARGUMENT.fullmatch(word) is not None


class Shell:
    """The variables of a script, whose path is `$0`; `turns`: the turn of each loop around a command, by variable."""

    def __init__(self, script: str | None, turns: Mapping[str, int]) -> None:
        self.unknown_branches = list[str]()
        self.loops = dict[str, list[str]]()  # around a command, by variable
        self._turns, self._num_turns = turns, 0
        self._branches = list[list[bool | None]]()  # of each `if` around, whether its conditions so far hold
        self._values: dict[str, list[str]] = {name: [os.environ.get(name, f"${name}")] for name in OF_THE_SHELL}
        self._values |= {"0": [script], "BASH_SOURCE": [script]} if script else {}

    def carry_out(self, statements: list[list[str]]) -> Iterator[list[str]]:
        """Yields the words of each statement as it is run: a loop around a command in one turn, others in all."""
        place = 0
        while place < len(statements):
            statement, place = self.in_branch(statements[place]), place + 1
            if statement[:1] not in (["for"], ["while"], ["until"]):
                yield self.run(statement)
                continue
            if (values := self._values_of_loop(statement)) is None:
                self.unknown_branches.append(" ".join(statement[:4]))
                continue
            body = statements[place : (place := _end_of_loop(statements, place))]
            if len(values) > 1 and any(map(_launches, body)):
                self.loops[statement[1]] = values
                turn = self._turns.get(statement[1], 0)
                values = values[turn : turn + 1]
            for value in values:
                self._num_turns += 1
                if self._num_turns > MAX_TURNS:
                    raise ValueError(f"its loops take more than {MAX_TURNS:,} turns")
                self._values[statement[1]] = [value]
                yield from self.carry_out(body)

    def _values_of_loop(self, words: list[str]) -> list[str] | None:
        """The values of `for NAME in ...`; None where they are not known."""
        if words[0] != "for" or words[2:3] != ["in"]:
            return None
        values = [each for word in words[3:] for each in self._expand(word)]
        return None if not values or any({*"$*?[{"} & {*value} for value in values) else values

    def run(self, statement: list[str]) -> list[str]:
        """Carries out an assignment; the words of any other statement, with variables replaced."""
        ends = [place for place, word in enumerate(statement) if re.match(r"\d*[<>]", word)]  # of redirections
        words = [word for word in statement[: min(ends, default=None)] if word not in _DECLARES]
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
                pieces = [value] if whole or "$(" in value or value.startswith("$") else value.split() or [""]
                parts[-1] += pieces[0]
                parts += pieces[1:]
                place = end
            else:
                place += 2 if char == "\\" else 1
                parts[-1] += word[place - 1]
        return [part for part in parts if part]

    def _value(self, text: str) -> str:
        """Replaces the variables and the arithmetic of a text; what is not known stays."""
        text = re.sub(r"\$\(pwd\)", "$PWD", text).replace("${BASH_SOURCE[0]}", "${BASH_SOURCE}")
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

        text, before = VARIABLE.sub(replaced, text), ""
        while text != before:
            before, text = text, _OUTPUT.sub(lambda found: self._output(found[1]) or found[0], text)
        return text

    def _output(self, command: str) -> str | None:
        """The output of a program that only changes a text that is known; None for any other."""
        with suppress(ValueError):
            words = shlex.split(re.sub(r"&?\d?>\s*&?[\w/]+", " ", command))
            match [] if "$" in command else [word for word in words if word not in ("--", "-P")]:
                case ["basename", path, *suffix] if len(suffix) < 2:
                    return os.path.basename(path.rstrip("/")).removesuffix("".join(suffix))  # noqa: PTH119
                case ["dirname", path]:
                    return os.path.dirname(path.rstrip("/")) or "."  # noqa: PTH120
                case ["realpath", path] | ["readlink", "-f", path] | ["cd", path, "&&", "pwd"]:
                    return os.path.normpath(Path(self._values["PWD"][0], path))
                case ["seq", *numbers] if len(numbers) in (1, 2, 3):
                    first, *step, last = map(int, numbers if len(numbers) > 1 else ["1", *numbers])
                    beyond = last + (-1 if step and step[0] < 0 else 1)
                    return " ".join(map(str, range(first, beyond, *step)[: MAX_TURNS + 1]))
        return None

    def _arithmetic(self, text: str) -> str | None:
        """The value of whole numbers and variables under + - * / %; None for anything else."""
        name = re.compile(r"\$?\{?\b([A-Za-z_]\w*)\b\}?")
        plain = name.sub(lambda found: " ".join(self._values.get(found[1], [found[0]])), text)
        try:
            return str(literal(ast.parse(plain.strip().replace("/", "//"), mode="eval").body, {}))
        except (SyntaxError, ValueError, TypeError, ZeroDivisionError):
            return None


def _launches(statement: list[str]) -> bool:
    """Tells whether a statement starts a program with arguments."""
    words = [word for word in statement if word not in (*_DECLARES, "then", "else", "do")]
    if words[1:2] == ["("] or words[:1] in (["set"], ["echo"]) or all(map(_ASSIGNMENT.fullmatch, words)):
        return False
    return start_of(words) > 0 or any(map(is_argument, words))


def _end_of_loop(statements: list[list[str]], start: int) -> int:
    """The place of the `done` of a loop whose body begins at `start`."""
    depth = 1
    for place in range(start, len(statements)):
        first = next((word for word in statements[place] if word not in ("then", "else", "do")), "")
        depth += (first in ("for", "while", "until")) - (first == "done")
        if not depth:
            return place
    return len(statements)


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


def statements_of(text: str) -> Iterator[list[str]]:
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
