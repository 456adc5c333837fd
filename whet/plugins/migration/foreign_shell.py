# SPDX-License-Identifier: Apache-2.0
"""Interprets shell scripts without running programs: variables, branches, loops, functions, and the output of programs
that only transform text (basename, dirname, realpath, seq, echo).

A branch on an unknown value ends the reading with `Undecided`. The reader then starts again with each value to which
the script compares the unknown value."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from whet.plugins.migration.foreign_shell_language import (
    MAX_TURNS,
    OTHER,
    UNKNOWN,
    ShellNode,
    Words,
    is_known,
    parse,
    unset_variables,
)

MAX_CALLS = 30  # of functions in functions
_ASSIGNMENT = re.compile(r"(\w+)(?:\[([^]]*)\])?(\+?)=(.*)", re.DOTALL)
_ARGUMENT = re.compile(r"[+~]{0,2}[\w.@/]+=.*|--\w.*", re.DOTALL)
_CHANGE = re.compile(r"\s*(\w+)\s*(?:(\+\+|--)|([-+*/%]?)=(?!=)(.*))\s*", re.DOTALL)
_TESTS = {"=": operator.eq, "==": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt}
_TESTS |= {f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_DECLARES = ("export", "local", "declare", "readonly", "typeset")
_TESTING = ("[", "[[", "test")
# Programs that neither train, nor change a variable, nor end the script.
_OF_SHELL = ("echo", "printf", "true", "false", ":", "cd", "ulimit", "wait", "sleep", "shopt", "trap", "source", ".")
_OF_FILES = ("mkdir", "rm", "cp", "mv", "ls", "cat", "tee", "touch", "chmod", "wget", "curl", "pip", "kill", "pkill")
_QUIET = (*_TESTING, *_OF_SHELL, *_OF_FILES)
_PREPARES = re.compile(r"activate\b|(bashrc|profile)\b|conda|/etc/|setvars|set_env")  # files without settings
_RUNS_MODULES = re.compile(r"(^|/)(python[\d.]*|torchrun|accelerate|deepspeed)$")
_LAUNCHERS = re.compile(r"(torch\.distributed|accelerate|deepspeed)\.")
_READ_DOCUMENT = re.compile(
    r"^[ \t]*read -.*d (?:''|\"\") (\w+) <<-?['\"]?(\w+)['\"]?\n((?s:.*?))\n[ \t]*\2$", re.MULTILINE
)


class Undecided(Exception):  # noqa: N818  # no error: the reader answers it
    """Raised at a branch on an unknown value; has the value's name, and candidates that lead to different branches."""

    def __init__(self, name: str, candidates: Iterable[str]) -> None:
        super().__init__(name)
        self.name, self.candidates = name, tuple(dict.fromkeys(candidates))


class _Leave(Exception):  # noqa: N818
    """Raised by `exit`, `return`, `break` and `continue`."""


class _NotKnown(Exception):  # noqa: N818
    """Raised for a program whose output is needed but unknown."""


class Launch(NamedTuple):
    """A started program: its arguments, its place in the script, and the loops around it with iteration numbers."""

    words: list[str]
    place: int
    turns: tuple[tuple[str, int], ...]


def start_of(words: list[str]) -> int:
    """Returns the index of the program's first argument: after `python -m MODULE`, FILE.py or `trl COMMAND`, else after
    the environment variables. Launchers come before it (srun, torchrun, accelerate, `ray job submit`)."""
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


def _programs(nodes: Iterable[ShellNode]) -> Iterator[tuple[str, ...]]:
    """Yields the simple commands that may start training, assign a variable, or leave the script."""
    for node in nodes:
        if node.kind == "simple" and node.words[0] not in _QUIET:
            yield node.words
        for part in node.parts:
            yield from _programs(part)


def _shown(nodes: Iterable[ShellNode]) -> str:
    """Returns the text of a condition. `--set TEXT=true` or `--set TEXT=false` decides this condition."""
    inner = (node.words if node.kind == "simple" else [_shown(part) for part in node.parts if part] for node in nodes)
    return " ".join(word for words in inner for word in words)


def _assigned(document: re.Match[str]) -> str:
    """Converts a here-document that is read into a variable to an assignment."""
    escaped = document[3].replace('"', '\\"')
    return f'{document[1]}="{escaped}"'


def _exits(nodes: Iterable[ShellNode]) -> bool:
    return next(iter(_programs(nodes)), ("",))[0] == "exit"


class Shell:
    """Interprets a script with the user's variables (`fixed`) and candidates for unknown ones (`assumed`)."""

    def __init__(self, script: str | None, fixed: Mapping[str, str], assumed: Mapping[str, str]) -> None:
        self.launches, self.loops = list[Launch](), dict[str, None]()  # programs; loops whose values are not known
        self.sources = dict[str, None]()  # files of the script's own that are not read
        self._words = Words(fixed, assumed, self._output)
        self._words.values |= {"0": {"0": script}, "BASH_SOURCE": {"0": script}} if script else {}
        self._functions = dict[str, ShellNode]()
        self._turns, self._num_turns, self._num_calls = tuple[tuple[str, int], ...](), 0, 0
        self._printed: list[str] | None = None  # of the command whose output is read
        self._open: tuple[str, tuple[str, ...]] | None = None  # what a condition depends on, with its candidates

    def carry_out(self, text: str) -> None:
        """Interprets a script.  Raises: Undecided; SyntaxError; ValueError beyond a limit."""
        with suppress(_Leave):
            self._run(parse(_READ_DOCUMENT.sub(_assigned, text)))

    def _run(self, body: Iterable[ShellNode]) -> bool | None:
        """Interprets commands. Tells whether the last one succeeds; None if that is unknown."""
        status: bool | None = True
        for node in body:
            self._words.budget.step()
            if node.kind == "function":
                self._functions[node.words[0]] = node
            else:
                status = self._run(node.parts[0]) if node.kind == "group" else getattr(self, f"_{node.kind}")(node)
        return status

    def _chain(self, node: ShellNode) -> bool | None:
        status: bool | None = True
        shown = ""
        for sign, part in zip(node.words, node.parts, strict=True):
            is_and, before = sign != "||", self._open
            if status is None and not any(_programs(part)) and part[0].words[:1] != ("echo",):
                after = self._run(part)  # a condition of several
                status, self._open = after if after is not is_and else None, before or self._open
            elif self._holds(status, (part, ()) if is_and else ((), part), shown) == is_and:
                self._open = None
                status = self._run(part)
            else:
                status = not is_and
            shown = _shown(part)
        return status

    def _pipe(self, node: ShellNode) -> bool | None:
        if self._printed is not None and len(node.parts) > 1:
            raise _NotKnown
        status = [self._run(part) for part in node.parts][-1]
        return None if status is None or len(node.parts) > 1 else status != bool(node.words)

    def _if(self, node: ShellNode) -> bool | None:
        condition, then, otherwise = node.parts
        self._open = None
        holds = self._holds(self._run(condition), (then, otherwise), _shown(condition))
        return self._run(then if holds else otherwise)

    def _holds(self, status: bool | None, branches: tuple[Sequence[ShellNode], ...], shown: str) -> bool:
        """Tells whether a condition holds. If it is unknown, a branch that only ends the script is not taken, and a
        choice between branches that change nothing is not needed.  Raises: Undecided."""
        then, otherwise = branches
        if status is not None:
            return status and not _exits(then)  # a script that exits without its arguments is read as if it had them
        if _exits(then) or _exits(otherwise) or not any(map(any, map(_programs, branches))):
            return not _exits(then) and not otherwise
        name, candidates = self._open or (shown, ("true", "false"))
        if self._words.given.get(name) in ("true", "false"):
            return self._words.given[name] == "true"
        raise _NotKnown if self._printed is not None else Undecided(name, candidates)

    def _case(self, node: ShellNode) -> bool | None:
        branches = [(list(map(self._words.text, patterns.split("\n"))), body)
                    for patterns, body in zip(node.words[1:], node.parts, strict=True)]  # fmt: skip
        name, text = self._value(node.words[0])
        if UNKNOWN.search(text):
            left = [patterns for patterns, body in branches if not _exits(body)]
            if not any(any(_programs(body)) for _, body in branches):
                return True
            likely = [_example(each) for patterns in left for each in patterns if each != "*"]
            rest = [patterns in left for patterns, _ in branches if "*" in patterns] or [not _unset(text)]
            others = [OTHER] * any(rest)  # a value that no other pattern matches
            raise _NotKnown if self._printed is not None else Undecided(name, [*_unset(text), *likely, *others])
        for patterns, body in branches:
            if any(each == "*" or (text != OTHER and fnmatchcase(text, each)) for each in patterns):
                return self._run(body)
        return True

    def _value(self, word: str) -> tuple[str, str]:
        """Returns the name for which `--set` gives the word's value, and the value; if unknown, the assumed value."""
        text = self._words.text(word)
        unknown, variable = UNKNOWN.fullmatch(text), re.fullmatch(r"\"?\$\{?(\w+)(?::?-[^}]*)?\}?\"?", word)
        name = variable[1] if variable else ((unset_variables(text) or [unknown[1]])[0] if unknown else word)
        return name, self._words.given.get(name, text) if UNKNOWN.search(text) else text

    def _for(self, node: ShellNode) -> bool | None:
        values = [each for word in node.words[1:] for each in self._words.expand(word)]
        if node.words[0].startswith("((") or not all(is_known(each) and not {*"*?["} & {*each} for each in values):
            return self._once(node.parts[0], " ".join(["for", node.words[0], "in", *node.words[1:]][:4]))
        around = self._turns
        for number, value in enumerate(values):
            self._turns = (*around, (f"for {node.words[0]} in {' '.join(values)}", number))
            self._words.assign(node.words[0], value)
            if not self._turn(node.parts[0]):
                break
        self._turns = around
        return True

    def _while(self, node: ShellNode) -> bool | None:
        while (holds := self._run(node.parts[0])) is (node.words[0] == "while") and self._turn(node.parts[1]):
            pass
        if holds is not None:
            return True
        return self._once(node.parts[1], f"{node.words[0]} {_shown(node.parts[0])}")

    def _once(self, body: Sequence[ShellNode], head: str) -> bool:
        """Interprets the body of a loop over unknown values once, if the body changes anything."""
        if any(_programs(body)):
            self.loops[head] = None
            self._turn(body)
        return True

    def _turn(self, body: Sequence[ShellNode]) -> bool:
        """Interprets one iteration of a loop. Returns False after a `break`."""
        self._num_turns += 1
        if self._num_turns > MAX_TURNS:
            raise ValueError(f"its loops take more than {MAX_TURNS:,} turns")
        try:
            self._run(body)
        except _Leave as left:
            if str(left) not in ("break", "continue"):
                raise
            return str(left) == "continue"
        return True

    def _simple(self, node: ShellNode) -> bool | None:
        """Interprets assignments, or a program with its arguments."""
        place, words, declares = 0, node.words, node.words[0] in _DECLARES
        given = list[re.Match[str]]()
        while place < len(words):
            if words[place].endswith("=(") and ")" in words[place:]:
                end = words.index(")", place)
                more = words[place].endswith("+=(")
                self._words.assign_array(words[place].rstrip("+=("), words[place + 1 : end], more=more)
                place = end
            elif found := _ASSIGNMENT.fullmatch(words[place]):
                given.append(found)
            elif not declares:
                break
            place += 1
        if place < len(words):
            return self._program(words[place:], id(node))
        for each in given:
            self._words.assign(each[1], self._words.text(each[4]), self._words.text(each[2] or "0"), more=bool(each[3]))
        return True

    def _program(self, written: Sequence[str], place: int) -> bool | None:
        """Interprets a builtin or a function, or records the start of a program."""
        if written[0] in _TESTING:
            return self._test([each for each in written[1:] if each not in ("]", "]]")])
        if written[0].startswith("(("):
            return self._arithmetic(written[0][2:-2])
        match words := [each for word in written for each in self._words.expand(word)]:
            case [("exit" | "return" | "break" | "continue") as how, *_]:
                raise _Leave(how)
            case [name, *rest] if name in self._functions:
                return self._call(name, rest)
            case ["set", "--", *rest]:
                self._words.arguments(tuple(rest))
            case ["shift", *count]:
                before = self._words.arguments(())
                self._words.arguments(before[int(count[0]) if count and count[0].isdigit() else 1 :])
            case ["unset", *names]:
                self._words.values = {key: value for key, value in self._words.values.items() if key not in names}
            case ["cd", *_, path] if is_known(path):
                self._words.assign("PWD", os.path.normpath(Path(self._words.text("$PWD"), path)))
            case ["eval", *rest]:
                return self._run(parse(" ".join(rest)))
            case [*_, "bash" | "sh" | "/bin/bash", "-c" | "-lc" | "-xc", text]:
                return self._run(parse(text))
            case [] | ["true" | ":" | "set" | "false", *_]:
                return words[:1] != ["false"]
            case _ if self._printed is not None:
                self._printed.append(self._output_of(words))
            case ["source" | ".", _, *_] if not _PREPARES.search(written[1]):
                self.sources[written[1]] = None
            case ["echo" | "printf" | "mkdir", *_] | ["ray", "start" | "stop", *_]:
                return True
            case _:
                self.launches += [Launch(words, place, self._turns)] * (len(words) > 1)
                return None
        return True

    def _call(self, name: str, arguments: list[str]) -> bool | None:
        self._num_calls += 1
        if self._num_calls > MAX_CALLS:
            raise ValueError(f"its functions call each other more than {MAX_CALLS} levels deep")
        before = self._words.arguments(tuple(arguments))
        try:
            return self._run(self._functions[name].parts[0])
        except _Leave as left:
            if str(left) != "return":
                raise
            return True
        finally:
            self._num_calls -= 1
            self._words.arguments(before)

    def _arithmetic(self, text: str) -> bool | None:
        """Evaluates `((...))`, which is a condition or changes a variable."""
        if change := _CHANGE.fullmatch(text):
            name, once, sign, value = change.groups()
            found = f"{name}{once[0]}1" if once else f"{name}{sign}({value})" if sign else value
            self._words.assign(name, self._words.text(f'"$(({found}))"'))
            return True
        return None if (number := self._words.number(text)) is None else bool(number)

    def _test(self, words: Sequence[str]) -> bool | None:
        """Tells whether a condition of `[` holds; None if that is unknown."""
        for sign in ("||", "-o", "&&", "-a"):
            if sign in words[1:-1]:
                sides = [self._test(words[: words.index(sign)]), self._test(words[words.index(sign) + 1 :])]
                decides = sign in ("||", "-o")
                return decides if decides in sides else None if None in sides else not decides
        if words[:1] == ["!"]:
            return None if (holds := self._test(words[1:])) is None else not holds
        if len(words) == 1 or words[0] in ("-z", "-n"):
            _, text = self._value(words[-1])
            if UNKNOWN.search(text) and not unset_variables(text):
                return None
            return (words[0] != "-z") == (bool(text) and not UNKNOWN.search(text))
        return self._compared(*words) if len(words) == 3 and words[1] in (*_TESTS, "=~") else None

    def _compared(self, left: str, sign: str, right: str) -> bool | None:
        (name, a), (other, b) = self._value(left), self._value(right)
        if UNKNOWN.search(a) or UNKNOWN.search(b):
            if UNKNOWN.search(a) and UNKNOWN.search(b):
                return None
            name, unknown, text = (name, a, b) if UNKNOWN.search(a) else (other, b, a)
            self._open = self._open or (name, (*_unset(unknown), *_candidates(sign, text)))
            return None
        if OTHER in a + b or sign == "=~":
            return sign == "!=" if sign != "=~" else None
        try:
            if sign[0] == "-":
                return bool(_TESTS[sign](int(a), int(b)))
        except ValueError:
            return False
        is_pattern = sign in ("==", "=", "!=") and {*"*?["} & {*b} and right[:1] not in "\"'"
        return fnmatchcase(a, b) != (sign == "!=") if is_pattern else bool(_TESTS[sign](a, b))

    def _output(self, command: str) -> str | None:
        """Returns the output of a command; None if it is unknown."""
        values, before = {name: dict(value) for name, value in self._words.values.items()}, (self._printed, self._open)
        self._printed = []
        try:
            self._run(parse(command))
            return "\n".join(self._printed)
        except (_NotKnown, _Leave, SyntaxError):
            return None
        finally:
            self._words.values, (self._printed, self._open) = values, before

    def _output_of(self, words: list[str]) -> str:
        """Computes the output of a program that only transforms text.  Raises: _NotKnown for any other program."""
        here = self._words.text("$PWD")
        match [word for word in words if word not in ("--", "-P", "-e", "-n")] if all(map(is_known, words)) else []:
            case ["echo", *texts]:
                return " ".join(texts)
            case ["basename", path, *suffix] if len(suffix) < 2:
                return os.path.basename(path.rstrip("/")).removesuffix("".join(suffix))  # noqa: PTH119
            case ["dirname", path]:
                return os.path.dirname(path.rstrip("/")) or "."  # noqa: PTH120
            case ["pwd"]:
                return here
            case ["realpath", path] | ["readlink", "-f", path]:
                return os.path.normpath(Path(here, path))
            case ["seq", *texts] if 0 < len(texts) < 4 and all(re.fullmatch(r"-?\d{1,9}", each) for each in texts):
                first, *step, last = map(int, texts if len(texts) > 1 else ["1", *texts])
                numbers = range(first, last + (-1 if step and step[0] < 0 else 1), *(step or [1]))
                return " ".join(map(str, numbers[: MAX_TURNS + 1]))
        raise _NotKnown


def _unset(text: str) -> list[str]:
    """Returns the first candidate of an unset variable (the empty text) as a list, empty if no variable is unset."""
    return [""] if unset_variables(text) else []


def _example(pattern: str) -> str:
    """Returns an example of a text that matches a pattern."""
    return re.sub(r"\[(.)[^]]*\]", r"\1", pattern.replace("*", "").replace("?", "x"))


def _candidates(sign: str, text: str) -> tuple[str, ...]:
    """Returns a value for which the comparison with `text` is true, and a value for which it is false."""
    if sign[0] != "-":
        return _example(text), OTHER
    number, above = int(text) if re.fullmatch(r"-?\d{1,9}", text) else 0, sign in ("-le", "-eq", "-ne")
    return str(number + (sign == "-gt") - (sign == "-lt")), str(number + above - (sign == "-ge"))
