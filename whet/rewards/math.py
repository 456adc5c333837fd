# SPDX-License-Identifier: Apache-2.0
"""Competition mathematics: the answer is an expression, correct if mathematically equal to the ground truth.

Expressions in running text are extracted whole: from "is 2/3" comes 2/3, not 3."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from functools import lru_cache
from itertools import accumulate
from typing import Any

import math_verify.parser
import sympy
from antlr4.atn.PredictionMode import PredictionMode
from latex2sympy2_extended import latex2sympy2
from latex2sympy2_extended.math_normalization import NormalizationConfig, extract_boxed_content
from math_verify import LatexExtractionConfig, parse

from whet.registry import register_reward
from whet.rewards.math_compare import as_interval, differs, verify
from whet.rewards.result import after_thought, is_repeated, number_text

# math-verify's own deadline uses SIGALRM, which works in the main thread only; the reward pool has its own. Without its
# deadline math-verify warns on first use, unless this flag says that it already warned.
math_verify.parser.TIMEOUT_WARNING_SHOWN = True
MAX_DEPTH, MAX_DIGITS = 10, 1_000_000  # with deeper brackets or longer numbers, parsing or comparing may never end
_BRACES = re.compile(r"(?P<box>\\f?box(?:ed)?\s*\{)|\\\\|\\[{}]|[{}]")
_TAG = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.IGNORECASE | re.DOTALL)
_ANSWER_IS = re.compile(r"\banswers?\b[*_\s]*(?:(?:is|are)\b|[:=])[\s*_:]*(?!\s*not\b)", re.IGNORECASE)
_SENTENCE = re.compile(r".*?(?=[.?!](?:\s|$)|\n|,\s(?:which|so|since|because|as|where)\b|$)")
_TRIGONOMETRIC = r"\\(?:sin|cos|tan|cot|sec|csc)"
_GROUP = r"(?:\\[,;:! ]|[ ~])(\d{3})"  # of thousands
# Normalisations of the answer and the truth beyond math-verify's own: docs/rewards.md has an example of each.
NORMALISATIONS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in {
        r"(?<!\\)\\[()\[\]]|\\?\$|(?<![\w}])[€£¥₹](?=\s?[\d.])|(?<=\d)\s?[€£¥₹]": "",
        r"^[\s*_`\"“”,;:=~≈]+|(?:(?<!\\)[\s*_`\"“”.,;:])+$": "",
        r"(?<=\d),\s?\\!\s?(?=\d{3}(?!\d))": ",",
        r"^(?![a-zA-Z]\s?=)([^=<>]*[^=<>,!\s])\s?=\s?([a-zA-Z])$": r"\2 = \1",
        r"^[a-zA-Z]\s?=\s?(?=-?\d{1,3}(?:,\d{3})+$)": "",
        rf"(?<![\w.,^{{\\])(\d{{1,3}}){_GROUP}(?:{_GROUP})?(?:{_GROUP})?(?![\w,])": r"\1\2\3\4",
        r"(?<!\\)\\[,;: ]|~": " ",
        r"(?<![\w.,)}^_/])(\d+)\s(\d+)\s?/\s?(\d+)(?![\w.,/^!])": r"\1\\frac{\2}{\3}",
        r"(?<![\w.])(\d+(?:\.\d*)?|\.\d+)[eE]\+?(-?\d+)(?![\w.])": r"\1 \\times 10^{\2}",
        r"(?<=\d)\s?x\s?(?=10\s?\^)": r" \\times ",
        r"\*\*": "^",
        r"\^\s?(-\d+)": r"^{\1}",
        r"√\s?(\d+|\w|\([^()]*\))": r"\\sqrt{\1}",
        r"²": "^2",
        r"³": "^3",
        r"\s?°": r"^\\circ",
        r"∞": r"\\infty ",
        r"(?<![\\a-zA-Z{])(sin|cos|tan|cot|log|ln|exp|pi)(?![a-zA-Z])": r"\\\1",
        r"\\(?:text|mathrm|mathbf|textbf|boldsymbol)\s?\{\s?(-?[\d.,/]+)\s?\}": r"\1",
        rf"({_TRIGONOMETRIC}(?:\s?\^\s?\{{?\d\}}?)?\s?(?:\\left)?[({{]?\s?)(-?[\d.]+)\s?\^\s?\{{?\\circ\}}?": (
            r"\1\\frac{\2\\pi}{180}"
        ),
    }.items()
)
_READING = {
    units: NormalizationConfig(units=units, malformed_operators=True, nits=True, boxed="all") for units in (False, True)
}
# math-verify reads the c of "x + c" as a unit.
_VARIABLE_LAST = re.compile(r"[\d}\s]\s?(?!(?:[ckm]m|kg|ft)$)[a-zA-Z]{1,2}$")
_PERCENT = re.compile(r"(.+?)\s?(?:\\?%|percent)")
# math-verify reads "2 3" as 5 and "1.000.000" as 0.
_MISREAD = re.compile(r"(?:^|[-+*/=(,])\s?\d[\d.]*\s\d|\d\.\d+\.\d")
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|-?\.\d+")
# A sum, difference or product: "17+25", "41-(-1)", "7\cdot(5+1)", but not "1.5 \times 10^{3}".
_LETTER = r"(?<![a-zA-Z\\])[a-zA-Z](?![a-zA-Z])"
_UNEVALUATED = re.compile(
    rf"(?:[\d)}}!]|{_LETTER})\s?[-+]\s?[-+]?(?:[\d({{.\\]|{_LETTER})"
    r"|(?:[*×·]|\\times|\\cdot|(?<=\d)\s?x(?=\s?\d))(?!\s?\{?10\}?\s?\^)|[\d)]\s?\((?=\s?[-\d])|\)\s?\d"
)
_SIDES = re.compile(r"(?<![<>!])=")
_TEXT = r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname)\s?\{"
# Text behind an answer that is a remark or another answer, not a unit: "42 \text{ is wrong}", "42 \text{ (43)}".
_REMARK = re.compile(
    rf"[\w)}}\]]\s*{_TEXT}"
    r"[^{}]*(?:(?<![a-zA-Z^])\d|[,;:?!]|(?<![a-z])\(|\b(?:not?|nor|or|and|but|is|was|wrong|maybe)\b)[^{}]*\}\s*$",
    re.IGNORECASE,
)
_UNIT_LAST = re.compile(rf"(?:{_TEXT}[\s~]*|[\d}}]\s?)([a-zA-Z]+)\.?\s?\}}?(?:\^\s?\{{?(\d)\}}?)?$")
_UNITS = {
    word: number
    for number, words in enumerate(
        (
            *("m meter metre", "cm centimeter centimetre", "mm millimeter millimetre", "km kilometer kilometre"),
            *("in inch", "ft foot feet", "yd yard", "mi mile", "g gram", "kg kilogram", "mg milligram", "s sec second"),
            *("min minute", "h hr hour", "day", "week", "month", "year", "dollar", "cent", "degree", "rad radian"),
            *("l liter litre", "ml milliliter millilitre"),
        )
    )
    for word in words.split()
}
_INTERVAL = re.compile(r"[(\[].+,.+[)\]]")
_LAYOUT = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\displaystyle|\\!|(?<!\w)\s|\s(?!\w)")


@register_reward(
    "math",
    aliases=("math_verify",),
    examples=((r"So \boxed{\frac12}.", "0.5", 1.0), ("The answer is 2/3.", "3", 0.0)),
)
def compute_score(
    solution_str: str, ground_truth: str | int | float, prompt_str: str = ""
) -> dict[str, float | str | None]:
    """1 where the answer equals the ground truth, else 0: as text, or in value or symbolically by math-verify.

    The answer is searched in the text after the last `</think>`: the last closed `\\boxed{}` or `\\fbox{}`, else the
    content of the last `<answer>` tag or the text after the last "answer is" or "answer:", else the last expression,
    unless it belongs to the prompt, repeated. An expression is read whole: "2/3" is not 3, and "5 or 6" is the set of
    both. Adjacent boxes are joined where the truth has several values. Both are normalised first (docs/rewards.md has
    the list). `ground_truth` may be boxed. `pred` is the answer's `vote`.
    """
    truth = extract_boxes(str(ground_truth), joined=True)
    truth = str(ground_truth) if truth is None else truth
    answer = extract_answer(solution_str, truth, prompt_str)
    if answer is None:
        return {"reward": 0.0, "pred": None}
    return {"reward": float(is_equal(answer, truth)), "pred": vote(answer)}


def extract_answer(text: str, truth: str = "", prompt: str = "") -> str | None:
    """Returns the answer as written, without its box; None where the text has none.

    Adjacent boxes are one answer where the truth has several values and the last box has one."""
    text = after_thought(text)
    box = extract_boxes(text)
    if box is not None:
        joined = text.count("box") > 1 and _is_several(truth) and not _is_several(box)
        return extract_boxes(text, joined=True) if joined else box
    if tagged := _TAG.findall(text):
        return last_expression(tagged[-1]) or tagged[-1].strip() or None
    if anchors := list(_ANSWER_IS.finditer(text)):
        rest = text[anchors[-1].end() :][: 4 * MAX_CHARS]
        sentence = _SENTENCE.match(rest)
        if sentence and sentence[0]:
            start, first = next(find_expressions(rest), (sentence.end() + 1, ""))
            return first if start <= sentence.end() else sentence[0]
    found = last_expression(text)
    start = text.rfind(found) if found and prompt else -1
    return None if start >= 0 and is_repeated(text, start, prompt) else found


def extract_boxes(text: str, *, joined: bool = False) -> str | None:
    """Returns the content of the last closed box; with `joined` also of the boxes that math-verify joins with it."""
    boxes, opened = [], []
    for brace in _BRACES.finditer(text):
        if brace[0][-1] == "{" and brace[0] != "\\{":
            opened.append(brace)
        elif brace[0] == "}" and opened and (opening := opened.pop())["box"]:
            boxes.append((opening.end(), brace.start()))
    if not boxes:
        return None
    start, end = max(boxes)
    return extract_boxed_content(text[: end + 1], "last") if joined else text[start:end].strip()


def is_equal(answer: str, truth: str) -> bool:
    """Returns whether two expressions, as LaTeX or plain text, are equal: as text, or according to math-verify. A sum,
    difference or product that is not worked out is not equal to a number, nor is a list, or an equation of others.

    There is no deadline: long, deep and huge expressions are not parsed, but simplifying others may still never end."""
    one, other = vote(answer), vote(truth)
    if one == other:
        return one != ""
    if _is_number(other):
        if _is_number(one):
            return Decimal(one) == Decimal(other)  # \displaystyle .5
        if not _may_be_number(answer, one, Decimal(other)):
            return False
    elif _INTERVAL.fullmatch(other):
        answer = as_interval(one) or answer
    if differs(_SIDES.split(one)[-1], _SIDES.split(other)[-1]):
        return False
    if (_REMARK.search(normalise(answer)) and not _REMARK.search(truth)) or len({*_units(answer, truth)}) > 1:
        return False
    units = not _VARIABLE_LAST.search(normalise(truth))
    parsed_truth, parsed_answer = _parse(truth, units), _parse(answer, units)
    if parsed_truth is None or parsed_answer is None:
        return False
    return verify(parsed_truth, parsed_answer)


def _may_be_number(answer: str, key: str, truth: Decimal) -> bool:
    """Tells whether an answer that is no number as it stands may have the value `truth`: 42.0 cm, 84/2, x = 42, but not
    the question again (17 + 25), an equation of other numbers (43 = 42), or a list (42, 42)."""
    sides = [vote(side) for side in _SIDES.split(normalise(answer)) if side.strip()]
    numbers = [Decimal(side) for side in sides if _is_number(side)] if len(sides) > 1 else []
    if numbers:
        return {*numbers} == {truth}
    parts = key.split(",")
    is_list = (key.startswith("[") and key.endswith("]")) or (len(parts) > 1 and len({*parts}) == 1)
    plain = re.sub(
        rf"{_TEXT}[^{{}}]*\}}|\\[dt]?frac|\{{(?=[\d.]+\}})|(?<=[\d.])\}}(?=\s?[-+*×·\\])",
        "",
        sides[-1] if sides else "",
    )
    return not is_list and not _UNEVALUATED.search(plain)


def _units(*answers: str) -> Iterator[tuple[int, str]]:
    """The numbers in `_UNITS` of the units that stand last in answers, with their powers."""
    for answer in answers:
        if found := _UNIT_LAST.search(answer.strip()):
            word = found[1].lower()
            yield from [(_UNITS[each], found[2] or "1") for each in (word, word[:-1], word[:-2]) if each in _UNITS][:1]


def _is_number(key: str) -> bool:
    """Tells whether the key of a vote is a number of a length that is quick to read."""
    return len(key) < 100 and _NUMBER.fullmatch(key) is not None


def vote(answer: str) -> str:
    """Returns the key under which a majority vote counts an answer: a number by its value, any other answer by its text
    without layout commands.

    Parsing could unite more answers, but a vote must not depend on how a parser fails."""
    text = normalise(answer)
    if _NUMBER.fullmatch(text):
        return number_text(Decimal(text.replace(",", "")))
    return _LAYOUT.sub("", text).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")


def normalise(text: str) -> str:
    """Returns `text` on one line, with `NORMALISATIONS` applied."""
    text = " ".join(text.split())
    for pattern, replacement in NORMALISATIONS if len(text) <= MAX_CHARS else ():
        text = pattern.sub(replacement, text)
    return text.strip()


@lru_cache(maxsize=256)
def _parse(text: str, units: bool = True) -> Any:
    """The expression as math-verify parses it; None for one that it cannot parse, misreads, or might never finish."""
    text = normalise(text)
    depths = open_brackets(text)
    if len(text) > MAX_CHARS or max(depths, default=0) > MAX_DEPTH or _MISREAD.search(text):
        return None
    percent = _PERCENT.fullmatch(text)
    latex = f"${percent[1]}$%" if percent else f"${text}$"
    parsed = parse(latex, [LatexExtractionConfig(normalization_config=_READING[units])], parsing_timeout=None)
    found = next((each for each in parsed if not isinstance(each, str)), None)
    left, _, right = text.rpartition("=")
    if found is None and left and not depths[len(left)] and not ("=" in left and "," in left):
        return _parse(right, units)  # the 1/2 of "P(A|B) = 1/2"
    return found if found is None or _is_feasible(found) else None


class TwoStageParser(latex2sympy2.PSParser):  # type: ignore[misc]
    """latex2sympy2's parser, with SLL prediction first, which costs less and gives the tree of LL or a syntax error;
    after an error with LL.  Source: https://www.antlr.org/papers/allstar-techreport.pdf"""

    def math(self) -> Any:
        """The tree of the whole text.  Raises: Exception for a syntax error."""
        self._interp.predictionMode = PredictionMode.SLL
        try:
            return super().math()
        except Exception:  # latex2sympy2 raises no other type for a syntax error
            self._interp.predictionMode = PredictionMode.LL
            self._input.tokenSource.reset()
            self._input.setTokenSource(self._input.tokenSource)
            self.reset()
            return super().math()


latex2sympy2.PSParser = TwoStageParser  # the name that it looks up for each text


def _is_feasible(expression: Any) -> bool:
    """True where the numbers have at most `MAX_DIGITS` digits and there is no sum, product, integral or limit."""
    for node in sympy.postorder_traversal(expression):
        if isinstance(node, (sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit)):
            return False
        if isinstance(node, (sympy.Pow, sympy.exp, sympy.factorial, sympy.binomial)):
            # Inner nodes come first, so the arguments of this one are small enough to evaluate.
            try:
                digits = (abs(node.args[-1]) * sympy.log(abs(node.args[0]) + 2, 10)).evalf(5)
            except TypeError:  # of a matrix
                return False
            if digits.is_comparable and digits > MAX_DIGITS:
                return False
    return True


def _is_several(text: str) -> bool:
    parsed = _parse(text)
    return isinstance(parsed, sympy.FiniteSet) and len(parsed) > 1


# -- expressions in running text ---------------------------------------------------------------------------------------

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
