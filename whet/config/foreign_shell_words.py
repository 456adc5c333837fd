# SPDX-License-Identifier: Apache-2.0
"""The variables of a shell script, and what its words stand for. No program is run: a text that is not known stays as
it is written, between two marks, and OTHER stands for any value that the script does not name."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase, translate

from whet.config.foreign_python import Budget, calculated
from whet.config.foreign_shell_syntax import piece_end

MAX_TURNS = 10_000  # of the loops of a script
OF_THE_SHELL = ("HOME", "USER", "PWD")
OTHER = "\ue002"
UNKNOWN = re.compile("\ue000([^\ue001]*)\ue001")
_NAME = re.compile(r"\$\{?([#!]?\w+)(?:\W.*)?", re.DOTALL)  # of a variable that is not known
_FIELDS = re.compile("(?:[^\\s\ue000]|\ue000[^\ue001]*\ue001)+")
_PARAMETER = re.compile(r"([#!]?)(\w+|[@*#?])(?:\[([^]]*)\])?(:?[-=+?]|##?|%%?|//?|\^\^?|,,?|:)?(.*)", re.DOTALL)
_BRACES = re.compile(r"([^${}'\"]*)\{(?:(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?|([^${}'\"\s]*,[^${}'\"\s]*))\}([^${}'\"]*)")
_PLAIN = re.compile(r"[^\\$`]+")  # in double quotes
MAX_CHANGED = 1_000  # characters of a text of which a part is cut by a pattern


def is_known(text: str) -> bool:
    """Tells whether a text has no unknown part."""
    return not UNKNOWN.search(text) and OTHER not in text


def unset_variables(text: str) -> list[str] | None:
    """The names of the variables of a text that are not set; None where it has the output of a command."""
    found = [_NAME.fullmatch(each) for each in UNKNOWN.findall(text)]
    return None if None in found else sorted({each[1] for each in found if each})


class Words:
    """The variables of a script. Those in `fixed` keep their values, those in `assumed` where the script gives them an
    unknown one; `run` gives the output of a command, None where it is not known."""

    def __init__(self, fixed: Mapping[str, str], assumed: Mapping[str, str], run: Callable[[str], str | None]) -> None:
        self.given, self._fixed, self._run, self.budget = {**assumed, **fixed}, fixed, run, Budget()
        self.values = {name: {"0": os.environ.get(name, f"${name}")} for name in OF_THE_SHELL}
        self.values |= {name: {"0": value} for name, value in self.given.items() if value} | {"?": {"0": "0"}}
        self.arguments(())

    def arguments(self, words: tuple[str, ...]) -> tuple[str, ...]:
        """Sets $@, $# and $1 to $9; returns those before."""
        before = tuple(self.values.get("@", {}).values())
        self.values |= {"@": {str(place): word for place, word in enumerate(words)}, "#": {"0": str(len(words))}}
        for place in map(str, range(1, 10)):
            self.values.pop(place, None)
            if (value := self.values["@"].get(str(int(place) - 1), self.given.get(place))) not in (None, ""):
                self.values[place] = {"0": str(value)}
        return before

    def assign(self, name: str, value: str, index: str = "0", *, more: bool = False) -> None:
        """Sets a variable or an element of an array; `more`: adds to its value."""
        if not self._fixed.get(name) and (is_known(value) or name not in self.given):
            place = self.values.setdefault(name, {})
            place[index] = self.budget.text(place.get(index, "") * more + value)

    def assign_array(self, name: str, words: tuple[str, ...], *, more: bool) -> None:
        """Sets an array; `more`: adds to it."""
        if not self._fixed.get(name):
            place = dict(self.values.get(name, {})) if more else {}
            for word in words:
                pair = re.fullmatch(r"\[([^]]+)\]=(.*)", word, re.DOTALL)
                found = {self.text(pair[1]): self.text(pair[2])} if pair else dict(enumerate(self.expand(word)))
                place |= {str(key) if pair else str(len(place) + int(key)): each for key, each in found.items()}
                self.budget.step(len(found))
            self.values[name] = place

    def text(self, word: str) -> str:
        """Returns the text that a word stands for, not split at spaces."""
        return " ".join(self.expand(word, split=False))

    def expand(self, word: str, *, split: bool = True) -> list[str]:
        """The words that a word stands for."""
        if split and "{" in word and (braces := _BRACES.fullmatch(word)):
            return [each for inner in _in_braces(braces) for each in self.expand(f"{braces[1]}{inner}{braces[6]}")]
        fields, is_word, place = [""], False, 0
        while place < len(word):
            piece = word[place : (place := piece_end(word, place))]
            if piece[0] == '"':
                found = self._quoted(piece[1:-1])
                is_word = is_word or bool(found)
            elif piece[0] in "$`" and piece[1:2] != "'":
                found = self._parameter(piece)
                found = [each for value in found for each in _FIELDS.findall(value)] if split else [" ".join(found)]
            else:
                plain = {"'": piece[1:-1], "$": piece[2:-1], "\\": piece[1:].strip("\n")}
                found, is_word = [plain.get(piece[0], piece)], True
            fields = [*fields[:-1], fields[-1] + found[0], *found[1:]] if found else fields
            self.budget.text(fields[-1])
        return [each for each in fields if each or is_word]

    def _quoted(self, text: str) -> list[str]:
        """The words of a text in double quotes: one, but for "$@" and "${ARRAY[@]}"."""
        if re.fullmatch(r"\$@|\$\{(@|\w+\[@\])(:\d+)?\}", text):
            return self._parameter(text)
        whole, place = "", 0
        while place < len(text):
            if found := _PLAIN.match(text, place):
                place, value = found.end(), found[0]
            elif text[place] == "\\":
                value, place = text[place : place + 2], place + 2
                value = value[1:].strip("\n") if value[1:] in ("$", "`", '"', "\\", "\n") else value
            else:
                value = " ".join(self._parameter(text[place : (place := piece_end(text, place))]))
            whole = self.budget.text(whole + value)
        return [whole]

    def _parameter(self, piece: str) -> list[str]:
        """The values of `$name`, `${...}`, `$((...))` or `$(...)`; several of an array."""
        self.budget.step()
        if piece[0] == "`" or piece.startswith("$("):
            return [self._command(piece[1:-1] if piece[0] == "`" else piece[2:-1])]
        parts = _PARAMETER.fullmatch(piece[2:-1] if piece[1:2] == "{" else piece[1:])
        if parts is None:
            return [piece if len(piece) == 1 else _unknown(piece)]
        prefix, name, index, sign, rest = parts.groups()
        values = self._values_of(self.text(f"${name}") if prefix == "!" else name, index)
        if prefix == "#" and values is not None:
            return [str(len(values) if index in ("@", "*") else len(values[0]))]
        if sign and sign[-1] in "-=+?":
            is_set = values is not None and (sign[0] != ":" or bool("".join(values)))
            if sign[-1] == "+":
                return [self._inner(rest)] if is_set else []
            if not is_set:
                value = _unknown(piece) if sign[-1] == "?" else self._inner(rest)
                if sign[-1] == "=":
                    self.assign(name, value)
                return [value]
        elif sign == ":" and values is not None and (name == "@" or index == "@"):
            return values[int(rest) - (name == "@") :] if rest.isdigit() else [_unknown(piece)]
        elif sign and values is not None:
            return [self._changed(value, sign, rest) if is_known(value) else _unknown(piece) for value in values]
        return [_unknown(piece)] if values is None else values

    def _command(self, command: str) -> str:
        """The value of `$((...))` or `$(...)`."""
        shown, is_number = f"$({command})", command.startswith("(") and command.endswith(")")
        found: object = self.number(command[1:-1]) if is_number else self.given.get(shown) or self._run(command)
        return _unknown(shown) if found is None else self.budget.text(str(found))

    def _values_of(self, name: str, index: str | None) -> list[str] | None:
        """The values of a variable; None where it is not set."""
        found = self.values.get(name)
        if found is None or index in ("@", "*") or name in "@*":
            return None if found is None else list(found.values())
        key = self.text(index or "0")
        return [found.get(key, found.get(str(self.number(key) if key not in found else key), ""))]

    def _inner(self, text: str) -> str:
        """The value of a default or a pattern."""
        return self.text(text if text[:1] in ("'", '"') else '"' + text.replace('"', "") + '"')

    def _changed(self, value: str, sign: str, rest: str) -> str:
        """A value without a prefix or a suffix, with a part replaced, cut, or in another case."""
        if sign[0] in "^,":
            change = str.upper if sign[0] == "^" else str.lower
            return change(value) if len(sign) == 2 else change(value[:1]) + value[1:]
        if len(value) > MAX_CHANGED:
            raise ValueError(f"a pattern cuts a text of {len(value):,} characters; expected at most {MAX_CHANGED:,}")
        if sign == ":":
            start, length = (self.number(each) for each in (*rest.split(":", 1), "1000")[:2])
            return value[start or 0 :][:length]
        pattern, _, new = (rest, "", "") if sign[0] in "#%" else rest.partition("/")
        pattern, new, is_long = self._inner(pattern), self._inner(new), len(sign) == 2
        if sign[0] == "/":
            return re.sub(translate(pattern)[4:-3], lambda _: new, value, count=0 if is_long else 1)
        lengths = range(len(value) + 1) if is_long != (sign[0] == "#") else reversed(range(len(value) + 1))
        parts = ((value[:at], value[at:]) for at in lengths)
        if sign[0] == "#":
            return next((after for before, after in parts if fnmatchcase(before, pattern)), value)
        return next((before for before, after in parts if fnmatchcase(after, pattern)), value)

    def number(self, text: str) -> int | None:
        """The value of arithmetic with whole numbers and variables; None where it is not known."""

        def value(name: re.Match[str]) -> str:
            return " ".join(self._values_of(name[0], None) or [name[0]])

        plain = self.text(f'"{text}"')
        for _ in range(3):  # a variable may name another
            plain = self.budget.text(re.sub(r"\b[A-Za-z_]\w*\b", value, plain))
        plain = re.sub(r"!(?!=)", " not ", plain.replace("/", "//").replace("&&", " and ").replace("||", " or "))
        try:
            return int(calculated(plain, budget=self.budget))
        except (ValueError, TypeError, OverflowError):
            return None


def _unknown(text: str) -> str:
    return f"\ue000{text}\ue001"


def _in_braces(found: re.Match[str]) -> list[str]:
    if found[5] is not None:
        return found[5].split(",")
    first, last, step = int(found[2]), int(found[3]), abs(int(found[4] or 1)) or 1
    numbers = range(first, last + 1, step) if last >= first else range(first, last - 1, -step)
    return [str(number) for number in numbers[: MAX_TURNS + 1]]
