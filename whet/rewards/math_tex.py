# SPDX-License-Identifier: Apache-2.0
r"""Answers in TeX, read by TeX's rules: pure layout is left out, and every argument is put into braces.

`\left(3,\dfrac\pi2\right)` is `(3,\frac{\pi}{2})`, `{\Large\bf 42}` is `42`, `2½` is `2\frac{1}{2}`."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection
from typing import Any

from whet.files import shipped_yaml

MAX_DEPTH = 10  # of braces; with deeper braces, reading or comparing may never end
_TOKEN = re.compile(r"\\(?:[a-zA-Z]+\*?|.)|.", re.DOTALL)
WORDS: Any = shipped_yaml("rewards/math_words.yaml")
_FUNCTIONS = WORDS["functions"].split()
_KINDS = {name: kind for kind, names in WORDS["commands"].items() for name in names.split()}
_NAMES: dict[str, str] = {name: written for written, names in WORDS["names"].items() for name in names.split()}
_LETTERS = str.maketrans({each: written for written, letters in WORDS["letters"].items() for each in letters})
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+"), str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SIMPLE = re.compile(r"[\d.,]*|[-+]|\\[,;:! ]|[a-zA-Z]|[-\d\W]*\d")  # text that needs braces only as an argument
_NO_WORDS = re.compile(r"(?:[^\W\d_](?![^\W\d_])|[\W\d_])*")
_VARIABLES = "abdeiknpqrtuvwxyzABCDEFGP"  # letters in \text{} that are no units


def clean(text: str) -> str:
    """Returns an answer on one line, without layout and with braces around every argument. If its braces do not
    match, or are nested deeper than `MAX_DEPTH`, joins its lines and changes nothing else."""
    given = " ".join(text.split())
    text = _RAISED[0].sub(lambda run: f"^{{{run[0].translate(_RAISED[1])}}}", given)
    text = re.sub("[¼½¾⅐-⅞]", _fraction, text)
    text = re.sub(r"(?<![a-zA-Z\\])sqrt(?=\s?[({\d])", r"\\sqrt*", re.sub(r"\.{3,}", r"\\ldots ", text))
    text = re.sub(r"(?<=[\w)}])\s?\*\*\s?(?=[\w({-])", "^", text)
    text = re.sub(r"\\mu\s?(\\(?:text|mathrm)\s?\{)|(\\(?:text|mathrm)\s?\{\s?)\\mu\s?", r"\1\2μ", text)
    try:
        read = _TexReader(unicodedata.normalize("NFKC", text.translate(_LETTERS))).read(())
        return re.sub(r"\\\{\s*\\\}", r"\\emptyset ", " ".join(read.split()))
    except IndexError:
        return given


def _fraction(sign: re.Match[str]) -> str:
    above, below = unicodedata.normalize("NFKC", sign[0]).split("\u2044")
    return rf"\frac{{{above}}}{{{below}}}"


class _TexReader:
    """Reads TeX tokens from left to right.  Raises: IndexError if a brace or an argument is missing."""

    def __init__(self, text: str) -> None:
        self.tokens: list[str] = _TOKEN.findall(text)
        self.place, self.depth = 0, 0
        self.has_rows = r"\begin" in text  # of a matrix; `\\` ends a row

    def read(self, ends: Collection[str]) -> str:
        """Reads text up to and including one of the tokens `ends`; without `ends`, up to the end."""
        self.enter()
        found = list[str]()
        while ends or self.place < len(self.tokens):
            if (token := self.next()) in ends:
                break
            if token == "}":
                raise IndexError
            if token in (r"\over", r"\choose"):
                name = {r"\over": r"\frac", r"\choose": r"\binom"}[token]
                found = [f"{name}{{{''.join(found).strip()}}}{{{self.read(ends).strip()}}}"]
                break
            found.append(self.part(token, "".join(found[-3:]).rstrip(r" ~\,;:!")))
        self.depth -= 1
        return "".join(found)

    def enter(self) -> None:
        self.depth += 1
        if self.depth > 2 * MAX_DEPTH:
            raise IndexError

    def next(self) -> str:
        self.place += 1
        return self.tokens[self.place - 1]

    def peek(self) -> str:
        """Returns the next token that is not a space; "" at the end."""
        while self.place < len(self.tokens) and self.tokens[self.place] == " ":
            self.place += 1
        return self.tokens[self.place] if self.place < len(self.tokens) else ""

    def part(self, token: str, before: str = "") -> str:
        """Returns a token with its arguments in cleaned form. `before` is the cleaned text before the token."""
        if token == "{":
            starts = self.place == 1
            inside = self.group()
            is_free = _SIMPLE.fullmatch(inside) and not re.search(r"\\[a-zA-Z]+\s?$|\}$", before)
            return inside if is_free or (starts and not self.peek()) else f"{{{inside}}}"
        if token in "^_":
            return self.script(token)
        if token in (r"\(", r"\)", r"\[", r"\]", "\\"):
            return ""
        if token == r"\ ":
            return "~"
        if token == r"\\" and self.peek() == "[" and self.has_rows:
            self.read("]")
        if token == r"\\":
            return token if self.has_rows else " "
        return self.command(token[1:], before) if re.match(r"\\[a-zA-Z]", token) else token

    def group(self) -> str:
        """Reads the content of braces after the opening brace."""
        return self.read("}").strip()

    def argument(self, *, whole: bool = False) -> str:
        """Reads the next argument: a group, a command with its own arguments, a digit or a letter. With `whole` it may
        be a whole number, or the content of parentheses, as in plain text."""
        token, self.place = self.peek(), self.place + 1
        if token == "{":
            return self.group()
        if whole and token == "(":
            return self.read(")").strip()
        if whole and token in "-+0123456789":
            while re.match(r"\d|\.\d", "".join(self.tokens[self.place : self.place + 2])):
                token += self.next()
            if token not in "-+":
                return token
            self.enter()
            return token + self.argument()
        if not token or token == "}":
            raise IndexError
        self.enter()
        found = self.part(token).strip()
        self.depth -= 1
        return found

    def script(self, mark: str) -> str:
        inside = self.argument(whole=True)
        if mark == "^" and inside in ("o", "°", r"\text{o}", r"\circ", r"^{\circ}"):
            return r"^{\circ}"
        if mark == "^" and re.fullmatch(r"(?:\\prime\s?)+", inside):
            return "'" * inside.count("prime")
        return f"{mark}{{{inside}}}"

    def command(self, name: str, before: str) -> str:
        """Returns the command `name` with its arguments in cleaned form. `before` is the cleaned text before it."""
        kind = _KINDS.get(name)
        if kind == "look":
            if name in ("left", "right") and self.peek() == ".":
                self.next()
            return " "
        if kind == "text" and self.peek() == "{":
            self.next()
            return self.words(self.group(), before[-1:].isdigit())
        if kind in ("hidden", "last"):
            if self.peek() == "[":
                self.read("]")
            elif name != "bbox":
                self.argument()
            return " " if kind == "hidden" else self.argument()
        if kind == "shown" and self.peek():
            return self.argument()
        if name in ("mathbb", "mathbf") and self.peek():
            inside = self.argument()
            return rf"\mathbb{{{inside}}}" if name == "mathbb" or inside in tuple("RZNQ") else inside
        known = _NAMES.get(name, f"\\{name}")
        if known in (r"\frac", r"\binom"):
            return f"{known}{{{self.argument()}}}{{{self.argument()}}}"
        if name in ("sqrt", "sqrt*"):  # the second is the root sign of plain text
            root = f"[{self.read(']')[1:]}]" if self.peek() == "[" else ""
            return rf"\sqrt{root}{{{self.argument(whole=name == 'sqrt*')}}}"
        if name == "log" and self.peek() == "_" and self.next():
            base = self.script("_")
            return r"\ln " if base == "_{e}" else rf"\log{base}"
        return known

    def words(self, inside: str, is_unit: bool) -> str:
        """Returns the content of a \\text{}. Without words it is read as mathematics, except letters after a number."""
        inside = re.sub(r"(?<!\\)\$|\\[,;: ]|~", lambda each: "" if each[0] == "$" else " ", inside).strip()
        if inside in _FUNCTIONS:
            return f"\\{inside} "
        if inside in ("percent", "percentage", "pct"):
            return r"\%"
        letters = [each for each in inside if each.isalpha()]
        is_unit = bool(letters) and ((is_unit and inside not in ("i", "e")) or not {*letters} & {*_VARIABLES})
        return inside if _NO_WORDS.fullmatch(inside) and not is_unit else rf"\text{{{inside.rstrip('.')}}}"
