# SPDX-License-Identifier: Apache-2.0
"""Mathematical expressions in running text, each extracted whole: from "is 2/3" comes 2/3, not 3."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import accumulate

MAX_CHARS = 500  # of an expression; a longer one is no answer

_WHOLE = (  # parts of an expression that may hold words, line ends and full stops
    r"\$\$.{1,1000}?\$\$",
    r"\\\[.{1,1000}?\\\]",
    r"\\\(.{1,500}?\\\)",
    r"(?<![\\$])\$(?!\s)(?:\\\$|[^$\n]){1,500}?(?<!\s)\$(?!\d)",
    r"\\[a-zA-Z]+\s*\{[^{}\n]{0,200}\}",
    r"(?<!\w)(?:and|or|sqrt|sin|cos|tan|cot|log|ln|exp|pi|infinity|percent)(?!\w)",
    r"(?<!\w)(?:minus|negative|not|twice|double|triple|(?:root|half|log|base \d+) of)(?=\s[-\d$\\(])",
    r"(?:(?<=[\d)}$]\s)|(?<=\s\w\s))(?:plus|times|over|out of|mod|choose|base|remainder|(?:divided|multiplied) by"
    r"|(?:raised )?to the(?: power of)?)(?=\s[-\d$\\(])",
    r"(?<=[\d)}$]\s)(?:hundred|thousand|million|billion|trillion|dozen|squared|cubed|factorial)(?!\w)",
)
# Two letters that are in neither list are a product. A word next to an operator belongs to the expression.
_SHORT = r"(?i:is|it|we|to|of|in|so|as|at|by|an|be|he|me|my|no|on|up|us|do|go|if|am|[cdkm]m|kg|ft|hr)(?!\w)"
_LONG = r"(?![a-zA-Z]{2}(?!\w))[^\W\d_²³]{2,}|[^\W\d_](?=['\u2019]\w)"
_ARTICLE = r"(?<![-=*/<>]\s)[aAI](?=\s(?:[\d$\\(]|(?!and\b|or\b)[a-z]{2}))"
_GAPS = (  # the text between two expressions: line ends, bullets, stops, arrows, tags, words, "5, 2 + 3 = 5"
    r"\n(?<![\d\s)}][/^+×÷·]\n)(?<![=+/×÷·(,]-\n)(?<![=+/×÷·(,]\s-\n)(?!(?<=[,(\[{]\n)[^()\[\]{}]{0,60}[)\]}])\s*(?:[-*+•>]\s)?",
    r"(?<!\d\s)[.?:](?=[\s*_\"”')]|$)|—|\s–\s|=>|->|→|⇒|⟹|<<|>>|##+|</?[a-zA-Z]+/?>",
    r"\\(?:implies|Rightarrow|rightarrow|quad|qquad)(?![a-zA-Z])",
    r"(?<=\d\s)(?:[cdkm]m|in|ft|yd|mi|units?)\^\{?[23]\}?(?!\w)",
    r"(?<![\w\\{+×÷·^])(?<![+×÷·^]\s)(?<!\s\*\s)(?<![\w)}]\*)"
    rf"(?:{_SHORT}|{_LONG}|{_ARTICLE})(?:['\u2019]\w+)*(?!\w|\^|\s?[+×÷·]|\s\*\s|\((?!e?s\)))",
    r"[\u2e80-\u9fff\uac00-\ud7af\uff01-\uff1f]",
    r",\s(?=[^,=\n)]{0,60}?(?<![\w{])\d[^,=\n)]{0,60}=)",
)
_TOKEN = re.compile(f"(?P<run>(?:{'|'.join(_WHOLE)}|(?!{'|'.join(_GAPS)}).)+)|{'|'.join(_GAPS)}", re.DOTALL)
_MATHS = re.compile(
    r"\d|\\[a-zA-Z(\[]|\$.+\$|[^\W\d_]\s*[-+*/^=<>][-\s]*[^\W\d_]|\w\(|[^\W\d_]!|=\s*\w|[π∞∅²³]", re.DOTALL
)
_AROUND = re.compile(r"^(?:[\s*,;=#)\]]|(?:and|or)\b)+|(?:[\s*,;=+/–-]|(?<!\\)[(\[]|\b(?:and|or))+$")
_CALCULATED = re.compile(r"^[^,;a-zA-Z]*\d[^,;a-zA-Z]*(?<![<>!])=\s*(?=\S)")  # "2 + 2 = " of "2 + 2 = 4"
# Arithmetic in words, up to its last number: "a third of", "10% of the", "from 3 to", "the odds are 1 to".
_LINKS = {"of", "to", "in", "than", "as", "per", "every", "from", "by", "with"}
_DETERMINERS = {"the", "all", "his", "her", "its", "their", "my", "our", "these", "those"}
_ONE = r"(?<![\w.,/])\\?\$?-?\d[\d.,]*"
_IN_WORDS = re.compile(
    r"(?:(?:(?<!the\s)(?<!\w)(?:hal(?:f|ves)|thirds?|quarters?|(?:four|fif|six|seven|eigh|nin|ten|hundred)ths?)"
    r"|\$?(?<![\w.,/])(?:[\d.,]*\d\s?(?:\\?%|percent)|\d+\s?/\s?\d+|\\[dt]?frac\{\w+\}\{\w+\})\$?)\sof"
    rf"|{_ONE}(?:\s(?!was|has)[a-z]{{2,}}s)?\s(?:(?:more|less|fewer|greater|larger|smaller|higher|lower)\sthan"
    r"|times\sas\s[a-z]+\sas|per|(?:in|to|for|of|out\sof)\severy)"
    rf"|(?<!\w)(?:twice|half)\sas\s[a-z]+\sas|(?<!\w)from\s{_ONE}(?:\s?\\?%)?(?:\s[a-z]+)?\sto"
    r"|(?<!\w)(?:ratio|odds|proportion|scale|range|chances?|probability)(?:(?=\s\d)|:|[^.?!\n\d]{0,60}\s(?:is|are|was|of))"
    rf"\s\d[\d.,]*\s(?:to|in)|(?i:(?<!\w)(?:add|subtract|multipl|divid)[a-z]*)\s{_ONE}\s(?:to|from|by|with))"
    rf"(?:\s(?:{'|'.join(_DETERMINERS)}))*\s+$"
)
_OF_KNOWN = re.compile(  # the text before "a third of 9" in "3 is a third of 9"
    r"\d(?:\s(?!(?:it|this|that|which)\s)[a-zA-Z]+){0,3}\s(?:is|are|was|were)(?:\s(?:an?|one|two|three|only|just))*\s*$"
)
_EXCLAIMED = re.compile(r"[\d.,$]+!+")  # math-verify also reads the "!" as punctuation, not as a factorial


def find_expressions(text: str) -> Iterator[tuple[int, str]]:
    """Yields (position, expression) for each expression of a text."""
    held: tuple[int, str] | None = None  # perhaps the first number of arithmetic in words
    for token in _TOKEN.finditer(text):
        run = token["run"]
        found = _trim(run.strip()) if run and _MATHS.search(run) else ""
        if not found:
            continue
        if _EXCLAIMED.fullmatch(found) and not text.startswith(".", token.end()):
            found = found.rstrip("!")
        start = token.end() - len(run.lstrip())
        first = None if "=" in run else _first_word(text, start)
        if held and (first is None or held[0] < first - 1):
            yield held
        held = (token.start(), found) if first is None else (first, f"{text[first:start]}{found}")
    if held:
        yield held


def last_expression(text: str) -> str | None:
    """Returns the last expression of a text, None where it has none."""
    for size in (MAX_CHARS, 8 * MAX_CHARS):  # it is nearly always in the last lines
        if len(text) > size and (found := list(find_expressions(text[-size:].partition("\n")[2]))):
            return found[-1][1]
    return next((found for _, found in reversed(list(find_expressions(text)))), None)


def open_brackets(text: str) -> list[int]:
    """Returns how many brackets are open after each character."""
    return list(accumulate((each in "([{") - (each in ")]}") for each in text))


def _first_word(text: str, last: int) -> int | None:
    """Start of the arithmetic in words whose last number is at `last`; None where there is none."""
    words = text[max(0, last - 24) : last].split()
    while words and words[-1] in _DETERMINERS:
        words.pop()
    if not words or words[-1] not in _LINKS:
        return None
    phrase = _IN_WORDS.search(text, max(0, last - 120), last)
    first = phrase.start() if phrase else 0
    return first if phrase and not _OF_KNOWN.search(text, max(0, first - 80), first) else None


def _trim(text: str) -> str:
    """`text` without the punctuation around it and without unmatched brackets at its ends."""
    before = None
    while text != before and len(text) <= MAX_CHARS:
        before = text
        text = _CALCULATED.sub("", _AROUND.sub("", text))
        unclosed = [0, *open_brackets(text)][-1]
        if unclosed < 0 and text[-1] in ")]":
            text = text[:-1]
        elif unclosed > 0 and text[0] in "([":
            text = text[1:]
    return text
