# SPDX-License-Identifier: Apache-2.0
"""Competition mathematics: the answer is an expression, correct if mathematically equal to the ground truth.

Expressions in running text are extracted whole: from "is 2/3" comes 2/3, not 3. The other rewards in this file return
the result of `math` as +1 and -1, or add a reward for the format, or use math-verify alone."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from decimal import Decimal
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, Literal, cast

import math_verify.grader
import math_verify.parser
import sympy
from antlr4.atn.PredictionMode import PredictionMode
from latex2sympy2_extended import latex2sympy2
from latex2sympy2_extended.math_normalization import NormalizationConfig, extract_boxed_content
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

from whet.options import Share
from whet.registry import register_reward
from whet.rewards.math_read import (
    MAX_CHARS,
    NORMALISATIONS as NORMALISATIONS,
    Expression,
    as_interval,
    differs,
    key_of,
    normalise,
    number,
    read,
    renamed,
    unit_after,
    verify,
)
from whet.rewards.math_tex import WORDS
from whet.rewards.result import after_thought, is_repeated
from whet.rewards.shaping import has_format

# math-verify's own deadline uses SIGALRM, which works in the main thread only; here the reward pool's deadline is used.
# Without its own deadline math-verify warns on first use, unless this flag says that it already warned.
math_verify.parser.TIMEOUT_WARNING_SHOWN = True
MAX_DEPTH, MAX_DIGITS = 10, 1_000_000  # with deeper brackets or longer numbers, parsing or comparing may never end
_BRACES = re.compile(r"(?P<box>\\f?box(?:ed)?\s*\{)|\\\\|\\[{}]|[{}]")
_TAG = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.IGNORECASE | re.DOTALL)
_ANSWER_IS = re.compile(r"\banswers?\b[*_\s]*(?:(?:is|are)\b|[:=])[\s*_:]*(?!\s*not\b)", re.IGNORECASE)
_SENTENCE = re.compile(r".*?(?=[.?!](?:\s|$)|\n|,\s(?:which|so|since|because|as|where)\b|$)")
_BECAUSE = re.compile(r"\b(?:because|since)\b")
_SAYS = re.compile(r"→|\b(?:is|are|was|were|be|out|equals?|has|have|gives?|yields?|becomes?|contains?)\b|[:=]")
_GOES_ON = re.compile(r"(?:, which is|(?<=\bis)|(?<=\bare)|(?<=[:=]))\s")
_READING = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="all")
_PERCENT = re.compile(r"(.+?)\s?(?:\\?%|percent)")
# math-verify reads "2 3" as 5 and "1.000.000" as 0.
_MISREAD = re.compile(r"(?:^|[-+*/=(,])\s?\d[\d.]*\s\d|\d\.\d+\.\d")
# A sum, difference or product: "17+25", "41-(-1)", "7\cdot(5+1)", but not "1.5 \times 10^{3}".
_LETTER = r"(?<![a-zA-Z\\])[a-zA-Z](?![a-zA-Z])"
_UNEVALUATED = re.compile(
    rf"(?:[\d)}}!]|{_LETTER})\s?[-+]\s?[-+]?(?:[\d({{.\\]|{_LETTER})"
    r"|(?:[*×·]|\\times|\\cdot|(?<=\d)\s?x(?=\s?\d))(?!\s?\{?10\}?\s?\^)|[\d)]\s?\((?=\s?[-\d])|\)\s?\d"
)
_SIDES = re.compile(r"(?<![<>!])=")
_LISTED = re.compile(r"\[\s*\"")
_INTERVAL = re.compile(r"[(\[].+,.+[)\]]")


@register_reward("math")
def compute_score(
    solution_str: str, ground_truth: str | int | float | list[str], prompt_str: str = ""
) -> dict[str, float | str | None]:
    """1 if the answer equals the ground truth, else 0: as text, or in value or symbolically by math-verify.

    The answer is searched in the text after the last `</think>`: the last closed `\\boxed{}` or `\\fbox{}`, else the
    content of the last `<answer>` tag or the text after the last "answer is" or "answer:", else the last expression,
    unless it belongs to a repeated prompt. An expression is read whole: "2/3" is not 3, and "5 or 6" is the set of
    both. Adjacent boxes are joined if the truth has several values. Answer and truth are normalised first (list in
    docs/rewards.md). `ground_truth` may be boxed; of a list of texts, also as JSON, the answer must equal any one
    (Skywork-OR1's data). `pred` is the answer's `vote`."""
    if truths := _truths(ground_truth):
        found = [compute_score(solution_str, each, prompt_str) for each in truths]
        return max(found, key=lambda each: each["reward"] or 0.0)
    truth = extract_boxes(str(ground_truth), joined=True)
    truth = str(ground_truth) if truth is None else truth
    answer = extract_answer(solution_str, truth, prompt_str)
    return {"reward": float(answer is not None and is_equal(answer, truth)), "pred": answer and vote(answer)}


def _truths(ground_truth: object) -> list[str]:
    """Returns the texts of a list of truths, given as a list or as JSON; empty for a single truth."""
    if isinstance(ground_truth, str) and _LISTED.match(ground_truth):
        try:
            ground_truth = json.loads(ground_truth)
        except ValueError:
            return []
    is_list = isinstance(ground_truth, list) and all(isinstance(each, str) for each in ground_truth)
    return list(cast(list[str], ground_truth)) if is_list else []


@register_reward("math_verify")
def by_math_verify(solution_str: str, ground_truth: str | int | float) -> dict[str, float | str | None]:
    """1 if math-verify alone finds the answer in a response equal to the ground truth, else 0. Called as in verl's
    `math_verify`: the boxed truth read as LaTeX, the response as an expression or LaTeX, six decimal places.

    `math` is stricter, and reads more notations. `pred` comes from `math`."""
    seconds = 5 if threading.current_thread() is threading.main_thread() else None  # the deadline needs signals
    math_verify.grader.TIMEOUT_WARNING_SHOWN = True  # else it warns if there is no deadline
    truth = parse(rf"\boxed{{{ground_truth}}}", [LatexExtractionConfig()], parsing_timeout=seconds)
    found = parse(solution_str, [ExprExtractionConfig(), LatexExtractionConfig()], parsing_timeout=seconds)
    correct = bool(truth) and math_verify.verify(truth, found, float_rounding=6, timeout_seconds=seconds)
    answer = extract_answer(solution_str)
    return {"reward": float(correct), "pred": answer and vote(answer)}


@register_reward("math_dapo", aliases=("aime",))
def math_dapo(
    solution_str: str, ground_truth: str | int | float, prompt_str: str = ""
) -> dict[str, float | str | None]:
    """1 if `math` finds the answer correct, else -1; the accuracy stays 1 and 0. `pred` comes from `math`.

    DAPO (arXiv:2503.14476) adds a penalty for length, which is `algorithm.overlong`.
    """
    found = compute_score(solution_str, ground_truth, prompt_str)
    correct = float(found["reward"] == 1.0)
    return {"reward": 2 * correct - 1, "acc": correct, "pred": found["pred"]}


@register_reward("geo3k", aliases={"r1v": {"format_weight": 0.5, "style": "answer"}})
def geo3k(
    solution_str: str,
    ground_truth: str | int | float,
    prompt_str: str = "",
    *,
    format_weight: Share = 0.1,
    style: Literal["answer", "boxed"] = "boxed",
) -> dict[str, float | str | None]:
    """(1 - format_weight) * accuracy + format_weight * format: the accuracy of `math`, the format of `format`.

    The result has the part `format`. `geo3k` requires a `\\boxed{}` after the thought, `r1v` an `<answer>`.
    """
    found = compute_score(solution_str, ground_truth, prompt_str)
    correct, shaped = float(found["reward"] == 1.0), float(has_format(solution_str, style))
    reward = (1 - format_weight) * correct + format_weight * shaped
    return {"reward": reward, "accuracy": correct, "format": shaped, "pred": found["pred"]}


def extract_answer(text: str, truth: str = "", prompt: str = "") -> str | None:
    """Returns the answer as written, without its box; None if the text has none.

    Adjacent boxes are one answer if the truth has several values and the last box has one value."""
    text = re.sub(r"(?<=[a-z])\$\^\{?([23])\}?\$", r"^\1", after_thought(text))  # "5 cm$^2$"
    box = extract_boxes(text)
    if box is not None:
        if text.count("box") > 1 and _is_several(truth) and not _is_several(box):
            return extract_boxes(text, joined=True)
        return _with_unit(text, text.find(box, text.rfind("box")), box, truth)
    if tagged := _TAG.findall(text):
        content = str(tagged[-1])
        if (found := last_expression(content)) is None or number(read(content).text) is not None:
            return content.strip() or None
        return _with_unit(content, content.rfind(found), found, truth)
    if anchors := list(_ANSWER_IS.finditer(text)):
        rest = text[anchors[-1].end() :][: 4 * MAX_CHARS]
        sentence = _SENTENCE.match(rest)
        if sentence and sentence[0]:
            return _stated(rest, sentence.end(), truth)
    found = last_expression(text)
    start = text.rfind(found) if found else -1
    if found is None or (prompt and start >= 0 and is_repeated(text, start, prompt)):
        return None
    return _with_unit(text, start, found, truth)


def _stated(text: str, end: int, truth: str) -> str:
    """Returns the answer in a sentence, the text up to `end`, that follows "answer is". It is the first expression, or
    if the sentence then gives the value of this expression, the value: 34 in "The largest $n$ is 34"."""
    because = _BECAUSE.search(text, 0, end)
    last = because.start() if because else end
    found = list(find_expressions(text))
    if not found or found[0][0] > last:
        return text[:end]
    if more := _GOES_ON.match(text, last):
        last = next((start for start, _ in found if start >= more.end() - 1), last)
    found = [each for each in found if each[0] <= last]
    chosen, is_named = found[0], text[: found[0][0]].strip("* \t\n$:") != ""
    if not is_named and number(normalise(chosen[1])) is not None:
        found = found[:1]  # "34 is the largest $n$"
    for (start, before), after in pairwise(found):
        between = text[start + len(before) : after[0]]
        if (says := _SAYS.search(between)) and (is_named or not between[: says.start()].strip("$ \n")):
            chosen = after
    return _with_unit(text, text.find(chosen[1], chosen[0]), chosen[1], truth)


def _with_unit(text: str, start: int, found: str, truth: str) -> str:
    """Adds the unit after the expression `found`, if the truth has a unit."""
    return found + (unit_after(text[start + len(found) :]) if read(truth).unit and start >= 0 else "")


def extract_boxes(text: str, *, joined: bool = False) -> str | None:
    """Returns the content of the last closed box; with `joined` also of the boxes that math-verify joins to it."""
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
    """Tells whether two answers, in LaTeX or plain text, are equal as text or for math-verify. If both have units, the
    units must be equal too. An unevaluated sum, difference or product never equals a number; nor does a list, or an
    equation of other expressions.

    There is no deadline: long, deep and huge expressions are not parsed, but simplifying other ones may still never
    end."""
    one, other = read(answer), read(truth)
    has_units = bool(one.unit and other.unit)
    if has_units and one.unit != other.unit:
        return False
    if vote(answer) == vote(truth):
        return vote(truth) != ""
    text = renamed(one, other)
    if text is None or (one.is_remark and not other.is_remark):
        return False
    if has_units or (other.is_sure and (one.is_sure or number(other.text) is not None)):
        return _is_same(text, other.text)
    return _is_same(normalise(answer), normalise(truth))  # where 5m is no 5 metres


def _is_same(answer: str, truth: str) -> bool:
    """Compares the mathematics of two answers as `is_equal` does, without units."""
    one, other = key_of(answer), key_of(truth)
    if one == other or (len(one) > 1 and one.isalpha() and one.casefold() == other.casefold()):
        return one != ""
    value = number(other)
    if value is not None:
        if (found := number(one)) is not None:
            return found == value  # \displaystyle .5
        if not _may_be_number(answer, one, value):
            return False
    elif _INTERVAL.fullmatch(other):
        answer = as_interval(one) or answer
    if differs(_SIDES.split(one)[-1], _SIDES.split(other)[-1]):
        return False
    parsed_truth, parsed_answer = _parse(truth), _parse(answer)
    if parsed_truth is None or parsed_answer is None:
        return False
    return verify(parsed_truth, parsed_answer)


def _may_be_number(answer: str, key: str, truth: Decimal) -> bool:
    """Tells whether an answer that is not a plain number may have the value `truth`. For 42 these are 42.0 cm, 84/2 and
    x = 42, but not the question again (17 + 25), an equation of other numbers (43 = 42), or a list (42, 42)."""
    sides = [key_of(normalise(side)) for side in _SIDES.split(answer) if side.strip()]
    numbers = [found for side in sides if (found := number(side)) is not None] if len(sides) > 1 else []
    if numbers:
        return {*numbers} == {truth}
    parts = key.split(",")
    is_list = (key.startswith("[") and key.endswith("]")) or (len(parts) > 1 and len({*parts}) == 1)
    plain = re.sub(
        r"\\text\{[^{}]*\}|\\frac|\{(?=[\d.]+\})|(?<=[\d.])\}(?=\s?[-+*×·\\])", "", sides[-1] if sides else ""
    )
    return not is_list and not _UNEVALUATED.search(plain)


def vote(answer: str) -> str:
    """Returns the key under which a majority vote counts an answer. For a number this is its value, without words such
    as "apples"; for any other answer its text without layout commands.

    Parsing could unite more answers, but a vote must not depend on a failure of the parser."""
    found = read(answer)
    is_number = not found.unit and found.condition is None and number(found.text) is not None
    return key_of(found.text if is_number else normalise(answer))


@lru_cache(maxsize=256)
def _parse(text: str) -> Expression | None:
    """Parses an expression with math-verify. None if it cannot parse it, misreads it, or might never finish."""
    text = normalise(text)
    depths = open_brackets(text)
    if len(text) > MAX_CHARS or max(depths, default=0) > MAX_DEPTH or _MISREAD.search(text):
        return None
    percent = _PERCENT.fullmatch(text)
    latex = f"${percent[1]}$%" if percent else f"${text}$"
    parsed = parse(latex, [LatexExtractionConfig(normalization_config=_READING)], parsing_timeout=None)
    found = next((each for each in parsed if not isinstance(each, str)), None)
    left, _, right = text.rpartition("=")
    if found is None and left and not depths[len(left)] and not ("=" in left and "," in left):
        return _parse(right)  # the 1/2 of "P(A|B) = 1/2"
    return found if found is None or _is_feasible(found) else None


class TwoStageParser(latex2sympy2.PSParser):  # type: ignore[misc]
    """latex2sympy2's parser in two stages: first SLL prediction, which is cheaper and gives the tree of LL or a syntax
    error; after an error LL prediction.  Source: https://www.antlr.org/papers/allstar-techreport.pdf"""

    def math(self) -> Any:
        """Parses the whole text to a syntax tree.  Raises: Exception for a syntax error."""
        self._interp.predictionMode = PredictionMode.SLL
        try:
            return super().math()
        except Exception:  # latex2sympy2 raises no other type for a syntax error
            self._interp.predictionMode = PredictionMode.LL
            self._input.tokenSource.reset()
            self._input.setTokenSource(self._input.tokenSource)
            self.reset()
            return super().math()


latex2sympy2.PSParser = TwoStageParser  # latex2sympy2 looks up this name for each text


def _is_feasible(expression: Expression) -> bool:
    """Tells whether evaluation surely ends: at most `MAX_DIGITS` digits, and no sum, product, integral or limit."""
    for node in sympy.postorder_traversal(expression):
        if isinstance(node, (sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit)):
            return False
        if isinstance(node, (sympy.Pow, sympy.exp, sympy.factorial, sympy.binomial)):
            # Inner nodes come first, so the arguments of this one are small enough to evaluate.
            try:
                digits = (abs(node.args[-1]) * sympy.log(abs(node.args[0]) + 2, 10)).evalf(5)
            except TypeError:  # raised for a matrix
                return False
            if digits.is_comparable and digits > MAX_DIGITS:
                return False
    return True


def _is_several(text: str) -> bool:
    parsed = _parse(text)
    return isinstance(parsed, sympy.FiniteSet) and len(parsed) > 1


# -- expressions in running text ---------------------------------------------------------------------------------------

_TEXT = WORDS["expressions"]
_WHOLE = "|".join(_TEXT["whole"])
_GAPS = "|".join(_TEXT["gaps"]).replace("<word>", "|".join(_TEXT["word"]))
_TOKEN = re.compile(f"(?P<run>(?:{_WHOLE}|(?!{_GAPS}).)+)|{_GAPS}", re.DOTALL)
_MATHS = re.compile(
    r"\d|\\[a-zA-Z(\[]|\$.+\$|[^\W\d_]\s*[-+*/^=<>][-\s]*[^\W\d_]|\w\(|[^\W\d_]!|=\s*\w|[π∞∅²³]", re.DOTALL
)
_AROUND = re.compile(r"^(?:[\s*,;=#)\]]|(?:and|or)\b)+|(?:[\s*,;=+/–-]|(?<!\\)[(\[]|\b(?:and|or))+$")
_CALCULATED = re.compile(  # "2 + 2 = " of "2 + 2 = 4", but not "4 = " of "4 = x"
    r"^[^,;a-zA-Z]*\d[^,;a-zA-Z]*(?<![<>!])=\s*(?=\S)(?!.*(?<![a-zA-Z\\])[a-zA-Z](?![a-zA-Z]))"
)
_LINKS, _DETERMINERS = _TEXT["links"].split(), _TEXT["determiners"].split()
_ARITHMETIC = "|".join(_TEXT["arithmetic"]).replace("<number>", _TEXT["number"])
_IN_WORDS = re.compile(rf"(?:{_ARITHMETIC})(?:\s(?:{'|'.join(_DETERMINERS)}))*\s+$")
_OF_KNOWN = re.compile(  # the text before "a third of 9" in "3 is a third of 9"
    r"\d(?:\s(?!(?:it|this|that|which)\s)[a-zA-Z]+){0,3}\s(?:is|are|was|were)(?:\s(?:an?|one|two|three|only|just))*\s*$"
)
_EXCLAIMED = re.compile(r"[\d.,$]+!+")  # math-verify also reads the "!" as punctuation, not as a factorial


def find_expressions(text: str) -> Iterator[tuple[int, str]]:
    """Yields (position, expression) for each expression of a text."""
    held: tuple[int, str] | None = None  # may be the first number of arithmetic in words
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
    """Returns the last expression of a text; None if it has none."""
    for size in (MAX_CHARS, 8 * MAX_CHARS):  # the last expression is nearly always in the last lines
        if len(text) > size and (found := list(find_expressions(text[-size:].partition("\n")[2]))):
            return found[-1][1]
    return next((found for _, found in reversed(list(find_expressions(text)))), None)


def open_brackets(text: str) -> list[int]:
    """Returns the number of open brackets after each character."""
    return list(accumulate((each in "([{") - (each in ")]}") for each in text))


def _first_word(text: str, last: int) -> int | None:
    """Finds the start of arithmetic in words ("a third of 9") whose last number is at `last`; None if there is none."""
    words = text[max(0, last - 24) : last].split()
    while words and words[-1] in _DETERMINERS:
        words.pop()
    if not words or words[-1] not in _LINKS:
        return None
    phrase = _IN_WORDS.search(text, max(0, last - 120), last)
    first = phrase.start() if phrase else 0
    return first if phrase and not _OF_KNOWN.search(text, max(0, first - 80), first) else None


def _trim(text: str) -> str:
    """Strips punctuation around `text`, and unmatched brackets at its ends."""
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
