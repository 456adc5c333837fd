# SPDX-License-Identifier: Apache-2.0
"""The language of shell scripts: `parse` reads a text into a tree of commands; `Words` holds variables and expands
words. It runs no program. An unknown part stays as written, between the characters U+E000 and U+E001; OTHER stands for
any value that the script does not name."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase, translate
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

from whet.plugins.migration.foreign_python import Budget, calculated

MAX_DEPTH = 50  # of commands in commands, and of substitutions in words
_PLAIN = re.compile(r"[^\s;&|()<>\"'`$\\]+")
_SKIPPED = re.compile(r"(?:[ \t\r]|\\\r?\n|\\\Z)+|#[^\n]*")
_OPERATOR = re.compile(r"&&|\|\||;;&?|;&|\|&|[\n;&|()]")
_REDIRECTION = re.compile(r"(?:\d*|&)(<<<|<<-?|>>|>\||[<>]&?)(-|\d+(?=[\s;&|)]|\Z))?")
_IN_QUOTES = {'"': re.compile(r"[^\"\\$`]+"), "(": re.compile(r"[^\"'\\$`()]+"), "{": re.compile(r"[^\"'\\$`{}]+")}
_CLOSING = {'"': '"', "(": ")", "{": "}"}
_VARIABLE = re.compile(r"\$(?:\w+|[@*#?$!-])?")
_BEFORE_A_COMMAND = ("", "for", "if", "elif", "while", "until", "then", "do", "else", "!", "{")
MAX_TURNS = 10_000  # of the loops of a script
OF_THE_SHELL = ("HOME", "USER")
OTHER = "\ue002"
UNKNOWN = re.compile("\ue000([^\ue001]*)\ue001")
_NAME = re.compile(r"\$\{?([#!]?\w+)(?:\W.*)?", re.DOTALL)  # of a variable that is not known
_FIELDS = re.compile("(?:[^\\s\ue000]|\ue000[^\ue001]*\ue001)+")
_PARAMETER = re.compile(r"([#!]?)(\w+|[@*#?])(?:\[([^]]*)\])?(:?[-=+?]|##?|%%?|//?|\^\^?|,,?|:)?(.*)", re.DOTALL)
_BRACES = re.compile(r"([^${}'\"]*)\{(?:(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?|([^${}'\"\s]*,[^${}'\"\s]*))\}([^${}'\"]*)")
_QUOTED = re.compile(r"[^\\$`]+")  # in double quotes
MAX_CHANGED = 1_000  # characters of a text of which a part is cut by a pattern
Token = tuple[Literal["word", "op"], str]


class ShellNode(NamedTuple):
    """A command. For each kind, its words; and its parts, each a list of commands:

    simple    the words, of an array `NAME=(`, its words and `)`; no parts
    chain     && or || before each part, "" before the first; a part for each command
    pipe      `!` if the pipe is negated; a part for each command
    if        no words; the condition, the `then` branch, the `else` branch (may be empty; an `elif` is an `if` in it)
    case      the word, and the patterns of each branch, joined by line breaks; a part for each branch
    for       the name of the variable and the words; the body
    while     `while` or `until`; the condition, the body
    function  the name; the body
    group     no words; the body"""

    kind: Literal["simple", "chain", "pipe", "if", "case", "for", "while", "function", "group"]
    words: tuple[str, ...] = ()
    parts: tuple[tuple[ShellNode, ...], ...] = ()


def piece_end(text: str, start: int, depth: int = 0) -> int:
    """Returns the end of the word's piece that begins at `start`: quoted text, a substitution, or plain text."""
    if depth > MAX_DEPTH:
        raise SyntaxError(f"it is nested more than {MAX_DEPTH} levels deep")
    opening = start + text.startswith(("${", "$(", "$'"), start)
    char, place = text[opening], opening + 1
    if char in "'`":
        place = text.find(char, place) % (len(text) + 1)
    elif char in '"(' or (char == "{" and opening > start):
        while place < len(text) and text[place] != _CLOSING[char]:
            if found := _IN_QUOTES[char].match(text, place):
                place = found.end()
            else:
                is_plain = text[place] in "{}()" if text[place] != "'" else char != "("
                is_plain = is_plain and text[place] != char
                place = place + 1 if is_plain else piece_end(text, place, depth + 1)
    elif char == "\\":
        return min(start + 2, len(text))
    else:
        plain = (_VARIABLE if char == "$" else _PLAIN).match(text, start)
        return plain.end() if plain else start + 1
    if place >= len(text):
        raise SyntaxError(f"a quote or bracket is not closed, in {text[start : start + 60]!r}")
    return place + 1


def _tokens_of(text: str) -> list[Token]:
    """Splits a script into words and operators, without comments, redirections and here-documents."""
    tokens, place, documents, in_test, redirection = list[Token](), 0, list[str](), False, ""
    while place < len(text):
        last = tokens[-1][1] if tokens and tokens[-1][0] == "word" else ""
        if found := _SKIPPED.match(text, place):
            place = found.end()
        elif (found := _REDIRECTION.match(text, place)) and not in_test:
            place, redirection = found.end(), found[0] if found[2] is None or found[1].startswith("<<") else ""
            if text.startswith("(", place):
                place, redirection = piece_end(text, place), ""  # the output of a command as a file
        elif text.startswith("((", place) and last in _BEFORE_A_COMMAND:
            tokens.append(("word", text[place : (place := piece_end(text, place))]))
        elif found := _OPERATOR.match(text, place):
            place, redirection = found.end(), ""
            tokens.append(("op", found[0]))
            while found[0] == "\n" and documents:
                end = re.compile(rf"^[^\S\n]*{documents.pop(0)}[^\S\n]*$\n?|\Z", re.MULTILINE).search(text, place)
                place = end.end() if end else place
        else:
            word = text[place : (place := max(_word_end(text, place), place + 1))]
            if redirection:  # the word is its target
                is_document = redirection.rstrip("-").endswith("<<") and "<<<" not in redirection
                documents += [re.escape(re.sub(r"[\"'\\]", "", word))] * is_document
                redirection = ""
                continue
            if text.startswith("(", place) and re.fullmatch(r"\w+\+?=", word):
                word, place = f"{word}(", place + 1
            tokens.append(("word", word))
            in_test = word == "[[" or (in_test and word != "]]")
    return tokens


def _word_end(text: str, place: int) -> int:
    while place < len(text) and text[place] not in " \t\r\n;&|()<>" and not text.startswith(("\\\n", "\\\r\n"), place):
        place = piece_end(text, place)
    return place


@lru_cache(256)
def parse(text: str) -> tuple[ShellNode, ...]:
    """Parses a script into its commands.  Raises: SyntaxError."""
    return _ShellParser([*_tokens_of(text), ("op", "\n")]).body("")


class _ShellParser:
    """Parses tokens by recursive descent."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens, self._place, self._depth = tokens, 0, 0
        self._end = ""  # the word that ended the last body

    @property
    def _word(self) -> str:
        """Returns the next token; "" at the end."""
        return self._tokens[self._place][1] if self._place < len(self._tokens) else ""

    def _take(self) -> str:
        self._place += 1
        if self._place > len(self._tokens):
            raise SyntaxError("it ends in the middle of a command")
        return self._tokens[self._place - 1][1]

    def _skip(self, *words: str) -> bool:
        before = self._place
        while self._word and self._word in words:
            self._place += 1
        return self._place > before

    def body(self, *ends: str) -> tuple[ShellNode, ...]:
        """Reads commands up to and including one of the words `ends`."""
        nodes, self._depth = list[ShellNode](), self._depth + 1
        if self._depth > MAX_DEPTH:
            raise SyntaxError(f"its commands are nested more than {MAX_DEPTH} levels deep")
        self._skip("\n", ";", "&")
        while self._word not in ends:
            nodes.append(self._chain())
            self._skip("\n", ";", "&")
        self._depth -= 1
        self._end = self._take() if self._word else ""
        return tuple(nodes)

    def _chain(self) -> ShellNode:
        signs, parts = [""], [(self._pipe(),)]
        while self._word in ("&&", "||"):
            signs.append(self._take())
            self._skip("\n")
            parts.append((self._pipe(),))
        return parts[0][0] if len(parts) == 1 else ShellNode("chain", tuple(signs), tuple(parts))

    def _pipe(self) -> ShellNode:
        negated, parts = self._skip("!"), [(self._command(),)]
        while self._skip("|", "|&"):
            self._skip("\n")
            parts.append((self._command(),))
        return parts[0][0] if len(parts) == 1 and not negated else ShellNode("pipe", ("!",) * negated, tuple(parts))

    def _command(self) -> ShellNode:
        after = [word for _, word in self._tokens[self._place + 1 : self._place + 3]]
        if self._skip("function") or after == ["(", ")"]:
            name = self._take()
            self._skip("(", ")", "\n")
            return ShellNode("function", (name,), ((self._command(),),))
        if self._word == "case":
            return self._case()
        if self._word not in ("(", "{", "while", "until", "for", "if"):
            return self._simple()
        word = self._take()
        if word in ("(", "{"):
            return ShellNode("group", (), (self.body(")" if word == "(" else "}"),))
        if word in ("while", "until"):
            return ShellNode("while", (word,), (self.body("do"), self.body("done")))
        if word == "for":
            words = [self._take()]
            while (each := self._take()) != "do":
                words += [each] if each not in ("\n", ";") else []
            return ShellNode("for", (words[0], *(words[2:] or ['"$@"'])), (self.body("done"),))
        return self._if()

    def _if(self) -> ShellNode:
        condition, then = self.body("then"), self.body("elif", "else", "fi")
        otherwise = (self._if(),) if self._end == "elif" else self.body("fi") if self._end == "else" else ()
        return ShellNode("if", (), (condition, then, otherwise))

    def _case(self) -> ShellNode:
        self._take()
        words, parts, self._end = [self._take()], list[tuple[ShellNode, ...]](), ""
        self._skip("\n", "in")
        while self._end != "esac" and not self._skip("esac"):
            self._skip("(", "\n")
            patterns = list[str]()
            while (each := self._take()) != ")":
                patterns += [each] if each != "|" else []
            words.append("\n".join(patterns))
            parts.append(self.body(";;", ";&", ";;&", "esac"))
            self._skip("\n")
        return ShellNode("case", tuple(words), tuple(parts))

    def _simple(self) -> ShellNode:
        words, is_test, in_array = list[str](), self._word == "[[", False
        while self._place < len(self._tokens) and (self._tokens[self._place][0] == "word" or is_test or in_array):
            words += [word] if (word := self._take()) != "\n" else []
            in_array = not is_test and (word.endswith("=(") or (in_array and word != ")"))
            if is_test and word == "]]":
                return ShellNode("simple", tuple(words))
        if is_test or in_array:
            raise SyntaxError(f"a quote or bracket is not closed, in {' '.join(words)[:60]!r}")
        if not words:
            raise SyntaxError(f"{self._word or 'the end'!r} begins no command")
        return ShellNode("simple", tuple(words))


def is_known(text: str) -> bool:
    """Tells whether a text has no unknown part."""
    return not UNKNOWN.search(text) and OTHER not in text


def unset_variables(text: str) -> list[str] | None:
    """Returns the names of the unset variables in a text; None if the text contains the output of a command."""
    found = [_NAME.fullmatch(each) for each in UNKNOWN.findall(text)]
    return None if None in found else sorted({each[1] for each in found if each})


class Words:
    """The variables of a script. Variables in `fixed` cannot change; variables in `assumed` have values for unknown
    ones. `run` returns the output of a command, or None if the output is unknown."""

    def __init__(self, fixed: Mapping[str, str], assumed: Mapping[str, str], run: Callable[[str], str | None]) -> None:
        self.given, self._fixed, self._run, self.budget = {**assumed, **fixed}, fixed, run, Budget()
        self.values = {name: {"0": os.environ.get(name, f"${name}")} for name in OF_THE_SHELL}
        self.values["PWD"] = {"0": str(Path.cwd())}  # as a shell does: the variable may be of another folder, or unset
        self.values |= {name: {"0": value} for name, value in self.given.items() if value} | {"?": {"0": "0"}}
        self.arguments(())

    def arguments(self, words: tuple[str, ...]) -> tuple[str, ...]:
        """Sets $@, $# and $1 to $9, and returns their former values."""
        before = tuple(self.values.get("@", {}).values())
        self.values |= {"@": {str(place): word for place, word in enumerate(words)}, "#": {"0": str(len(words))}}
        for place in map(str, range(1, 10)):
            self.values.pop(place, None)
            if (value := self.values["@"].get(str(int(place) - 1), self.given.get(place))) not in (None, ""):
                self.values[place] = {"0": str(value)}
        return before

    def assign(self, name: str, value: str, index: str = "0", *, more: bool = False) -> None:
        """Sets a variable or an element of an array. With `more` it appends to the value."""
        if not self._fixed.get(name) and (is_known(value) or name not in self.given):
            place = self.values.setdefault(name, {})
            place[index] = self.budget.text(place.get(index, "") * more + value)

    def assign_array(self, name: str, words: tuple[str, ...], *, more: bool) -> None:
        """Sets an array. With `more` it appends to the array."""
        if not self._fixed.get(name):
            place = dict(self.values.get(name, {})) if more else {}
            for word in words:
                pair = re.fullmatch(r"\[([^]]+)\]=(.*)", word, re.DOTALL)
                found = {self.text(pair[1]): self.text(pair[2])} if pair else dict(enumerate(self.expand(word)))
                place |= {str(key) if pair else str(len(place) + int(key)): each for key, each in found.items()}
                self.budget.step(len(found))
            self.values[name] = place

    def text(self, word: str) -> str:
        """Expands a word to one text, not split at spaces."""
        return " ".join(self.expand(word, split=False))

    def expand(self, word: str, *, split: bool = True) -> list[str]:
        """Expands a word into any number of words; none if it is empty and not quoted."""
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
        """Expands a text in double quotes into one word; "$@" and "${ARRAY[@]}" give several."""
        if re.fullmatch(r"\$@|\$\{(@|\w+\[@\])(:\d+)?\}", text):
            return self._parameter(text)
        whole, place = "", 0
        while place < len(text):
            if found := _QUOTED.match(text, place):
                place, value = found.end(), found[0]
            elif text[place] == "\\":
                value, place = text[place : place + 2], place + 2
                value = value[1:].strip("\n") if value[1:] in ("$", "`", '"', "\\", "\n") else value
            else:
                value = " ".join(self._parameter(text[place : (place := piece_end(text, place))]))
            whole = self.budget.text(whole + value)
        return [whole]

    def _parameter(self, piece: str) -> list[str]:
        """Returns the value of `$name`, `${...}`, `$((...))` or `$(...)`; an array has several values."""
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
        """Returns the value of `$((...))` or `$(...)`."""
        shown, is_number = f"$({command})", command.startswith("(") and command.endswith(")")
        found: object = self.number(command[1:-1]) if is_number else self.given.get(shown) or self._run(command)
        return _unknown(shown) if found is None else self.budget.text(str(found))

    def _values_of(self, name: str, index: str | None) -> list[str] | None:
        """Returns the values of a variable; None if it is not set."""
        found = self.values.get(name)
        if found is None or index in ("@", "*") or name in "@*":
            return None if found is None else list(found.values())
        key = self.text(index or "0")
        return [found.get(key, found.get(str(self.number(key) if key not in found else key), ""))]

    def _inner(self, text: str) -> str:
        """Expands a default or a pattern inside `${...}`."""
        return self.text(text if text[:1] in ("'", '"') else '"' + text.replace('"', "") + '"')

    def _changed(self, value: str, sign: str, rest: str) -> str:
        """Applies an operator of `${...}`: removes a prefix or suffix, replaces or cuts a part, or changes the case."""
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
        """Evaluates integer arithmetic with variables; None if the result is unknown."""

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
