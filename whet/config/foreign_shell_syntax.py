# SPDX-License-Identifier: Apache-2.0
"""The syntax of shell scripts: reads a text into a tree of commands. Nothing is run."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal, NamedTuple

MAX_DEPTH = 50  # of commands in commands, and of substitutions in words
_PLAIN = re.compile(r"[^\s;&|()<>\"'`$\\]+")
_SKIPPED = re.compile(r"(?:[ \t\r]|\\\r?\n|\\\Z)+|#[^\n]*")
_OPERATOR = re.compile(r"&&|\|\||;;&?|;&|\|&|[\n;&|()]")
_REDIRECTION = re.compile(r"(?:\d*|&)(<<<|<<-?|>>|>\||[<>]&?)(-|\d+(?=[\s;&|)]|\Z))?")
_IN_QUOTES = {'"': re.compile(r"[^\"\\$`]+"), "(": re.compile(r"[^\"'\\$`()]+"), "{": re.compile(r"[^\"'\\$`{}]+")}
_CLOSING = {'"': '"', "(": ")", "{": "}"}
_VARIABLE = re.compile(r"\$(?:\w+|[@*#?$!-])?")
_BEFORE_A_COMMAND = ("", "for", "if", "elif", "while", "until", "then", "do", "else", "!", "{")
Token = tuple[Literal["word", "op"], str]


class Node(NamedTuple):
    """A command; what its words are, and each of its parts:

    simple    the words, of an array `NAME=(`, its words and `)`
    chain     && or || before each part, "" before the first; a command
    pipe      `!` where it is negated; a command
    if        none; the condition, what follows it, and an `else`, empty without one; an `elif` is an `if` in it
    case      the word, and the patterns of each branch, joined by line breaks; a branch
    for       the name and the words; the body
    while     while or until; the condition, the body
    function  the name; the body
    group     none; the body"""

    kind: Literal["simple", "chain", "pipe", "if", "case", "for", "while", "function", "group"]
    words: tuple[str, ...] = ()
    parts: tuple[tuple[Node, ...], ...] = ()


def piece_end(text: str, start: int, depth: int = 0) -> int:
    """The end of the piece of a word that begins at `start`: a quoted text, a substitution, a plain run."""
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
    """The words and operators of a script, without comments, redirections and here-documents."""
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
def parse(text: str) -> tuple[Node, ...]:
    """The commands of a script.  Raises: SyntaxError."""
    return _Parser([*_tokens_of(text), ("op", "\n")]).body("")


class _Parser:
    """Reads tokens by recursive descent."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens, self._place, self._depth = tokens, 0, 0
        self._end = ""  # the word that ended the last body

    @property
    def _word(self) -> str:
        """The next token; "" at the end."""
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

    def body(self, *ends: str) -> tuple[Node, ...]:
        """Commands up to one of the words `ends`, which is read too."""
        nodes, self._depth = list[Node](), self._depth + 1
        if self._depth > MAX_DEPTH:
            raise SyntaxError(f"its commands are nested more than {MAX_DEPTH} levels deep")
        self._skip("\n", ";", "&")
        while self._word not in ends:
            nodes.append(self._chain())
            self._skip("\n", ";", "&")
        self._depth -= 1
        self._end = self._take() if self._word else ""
        return tuple(nodes)

    def _chain(self) -> Node:
        signs, parts = [""], [(self._pipe(),)]
        while self._word in ("&&", "||"):
            signs.append(self._take())
            self._skip("\n")
            parts.append((self._pipe(),))
        return parts[0][0] if len(parts) == 1 else Node("chain", tuple(signs), tuple(parts))

    def _pipe(self) -> Node:
        negated, parts = self._skip("!"), [(self._command(),)]
        while self._skip("|", "|&"):
            self._skip("\n")
            parts.append((self._command(),))
        return parts[0][0] if len(parts) == 1 and not negated else Node("pipe", ("!",) * negated, tuple(parts))

    def _command(self) -> Node:
        after = [word for _, word in self._tokens[self._place + 1 : self._place + 3]]
        if self._skip("function") or after == ["(", ")"]:
            name = self._take()
            self._skip("(", ")", "\n")
            return Node("function", (name,), ((self._command(),),))
        if self._word == "case":
            return self._case()
        if self._word not in ("(", "{", "while", "until", "for", "if"):
            return self._simple()
        word = self._take()
        if word in ("(", "{"):
            return Node("group", (), (self.body(")" if word == "(" else "}"),))
        if word in ("while", "until"):
            return Node("while", (word,), (self.body("do"), self.body("done")))
        if word == "for":
            words = [self._take()]
            while (each := self._take()) != "do":
                words += [each] if each not in ("\n", ";") else []
            return Node("for", (words[0], *(words[2:] or ['"$@"'])), (self.body("done"),))
        return self._if()

    def _if(self) -> Node:
        condition, then = self.body("then"), self.body("elif", "else", "fi")
        otherwise = (self._if(),) if self._end == "elif" else self.body("fi") if self._end == "else" else ()
        return Node("if", (), (condition, then, otherwise))

    def _case(self) -> Node:
        self._take()
        words, parts, self._end = [self._take()], list[tuple[Node, ...]](), ""
        self._skip("\n", "in")
        while self._end != "esac" and not self._skip("esac"):
            self._skip("(", "\n")
            patterns = list[str]()
            while (each := self._take()) != ")":
                patterns += [each] if each != "|" else []
            words.append("\n".join(patterns))
            parts.append(self.body(";;", ";&", ";;&", "esac"))
            self._skip("\n")
        return Node("case", tuple(words), tuple(parts))

    def _simple(self) -> Node:
        words, is_test, in_array = list[str](), self._word == "[[", False
        while self._place < len(self._tokens) and (self._tokens[self._place][0] == "word" or is_test or in_array):
            words += [word] if (word := self._take()) != "\n" else []
            in_array = not is_test and (word.endswith("=(") or (in_array and word != ")"))
            if is_test and word == "]]":
                return Node("simple", tuple(words))
        if is_test or in_array:
            raise SyntaxError(f"a quote or bracket is not closed, in {' '.join(words)[:60]!r}")
        if not words:
            raise SyntaxError(f"{self._word or 'the end'!r} begins no command")
        return Node("simple", tuple(words))
