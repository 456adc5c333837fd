# SPDX-License-Identifier: Apache-2.0
"""Verifiable instructions of IFEval (Zhou et al. 2023, arXiv:2311.07911): a program can check each of them.

`CHECKS` has one short function for each of the 25 instructions. They follow the authors' code, whose keywords are
regular expressions. Sentences and words are split by rules of this file instead of nltk's trained models.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from whet.errors import DataError, pip_install
from whet.options import Number, fits, words
from whet.registry import register_reward
from whet.rewards.result import after_thought, truth_error

_OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_POSTSCRIPTS = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
_CODE_FENCE = re.compile(r"\A```(?:json|Json|JSON)?|```\Z")
# A sentence ends after . ? ! and closing quotes, except after an abbreviation or an initial, and after a number or dots
# before a small letter.
_END = re.compile(
    r"(?<![.?!])([.?!]++)(?=[)\"';}\]*:@({\[\u2018-\u201d\xab\xbb]|\s|\Z)[\"'\u201d\u2019)\]}]*+(?=\s*+(\S?))"
)
_ABBREVIATED = re.compile(
    r"(?:^|[\s\"'\u201c\u2018(\[{*_])(?:[jms]r|mrs|ms|dr|prof|rev|capt|lt|sgt|st|inc|ltd|corp|vs|e\.g|i\.e|cf|vol|dept"
    r"|approx|jan|feb|aug|sept?|oct|nov|dec|[ap]\.m|u\.[sk]|ph\.d|[a-z](?<!i))$",
    re.IGNORECASE,
)
# Words as in the Penn Treebank: "DON'T" is DO and N'T, "AT&T" is three tokens.
_BETWEEN_WORDS = re.compile(
    r"[\s;@#$%&*?!()\[\]{}<>\"`«»\u2018\u2019\u201c-\u201e\u2012-\u2015]+|--|''|\.{2,}|[:,](?!\d)"
    r"|(?<=[^'\s])(?=(?:'(?:[sSmMdD]|ll|LL|re|RE|ve|VE)|n't|N'T)(?!\.?[\w/]|'(?!'|\s+\S)|-(?!-)))"
    r"|(?i:\b(?=(?:cannot|gimme|gonna|gotta|lemme)\b|wanna\s)|(?<=\bcan)(?=not\b)|(?<=\bgon)(?=na\b)|(?<=\bgot)(?=ta\b)"
    r"|(?<=\b(?:gim|lem))(?=me\b)|(?<=\bwan)(?=na\s))"
)


@register_reward("ifeval", rows_checked_by="whet.plugins.scores.ifeval:check_row")
def compute_score(
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    mode: Literal["strict", "loose"] = "strict",
    score: Literal["all", "fraction"] = "all",
) -> dict[str, float]:
    """1 if the response follows all instructions, else 0; with `score=fraction` the share that it follows.

    `ground_truth`, or `extra_info`, has `instruction_id_list` and `kwargs` as in google/IFEval, as a dict or as JSON.
    `loose` also accepts a response without its first line, its last line, or all `*`. Only the text after the last
    `</think>` counts. The part `followed` is the share of instructions followed.  Raises: ValueError for an unknown
    instruction, an argument that is missing or of the wrong type, and a number of arguments that differs from the
    number of instructions."""
    answer = after_thought(solution_str)
    lines = answer.split("\n")
    tries = [answer]
    if mode == "loose":
        tries += ["\n".join(cut).strip() for cut in (lines[1:], lines[:-1], lines[1:-1])]
        tries += [text.replace("*", "") for text in tries]
    checks = read_instructions(ground_truth, extra_info or {})
    followed = [any(bool(text.strip()) and check(text) for text in tries) for check in checks]
    share, whole = sum(followed) / len(followed), float(all(followed))
    return {"reward": share if score == "fraction" else whole, "accuracy": whole, "followed": share}


def check_row(ground_truth: Any, extra_info: Mapping[str, Any], *_: object) -> None:
    """Raises: ValueError or ModuleNotFoundError for instructions that cannot be read or checked."""
    for check in read_instructions(ground_truth, extra_info):
        check("1")


def read_instructions(ground_truth: Any, extra_info: Mapping[str, Any]) -> list[Callable[[str], bool]]:
    """Returns a check for each instruction of a row, in the row's order.  Raises: ValueError."""
    try:
        found = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    except ValueError:
        found = None
    row = found if isinstance(found, Mapping) and "instruction_id_list" in found else extra_info
    names, arguments = row.get("instruction_id_list"), row.get("kwargs")
    if not names or not isinstance(names, list | tuple) or not isinstance(arguments, list | tuple):
        lists = "a dict or JSON with the lists instruction_id_list (not empty) and kwargs"
        raise truth_error(ground_truth, lists, "put them there or into extra_info")
    if len(names) != len(arguments):
        found, change = f"{len(arguments)} of {len(names)} instructions", "add {} for an instruction without arguments"
        raise DataError("kwargs", found, "one dict of arguments for each", change)
    pairs = zip(names, arguments, strict=True)
    return [_bind(name, given if isinstance(given, Mapping) else {}) for name, given in pairs]


def _bind(name: str, given: Mapping[str, Any]) -> Callable[[str], bool]:
    """Binds the check of one instruction to its arguments.  Raises: ValueError, ModuleNotFoundError."""
    if name not in CHECKS:
        raise DataError("instruction_id_list", name, f"one of {', '.join(CHECKS)}", "correct it")
    if name.startswith(("language:", "change_case:english_")):
        _find_langdetect(name)
    check, values = CHECKS[name], []
    for argument in [*inspect.signature(check).parameters][1:]:
        value, takes = given.get(argument), TYPES.get(argument, Number)
        if takes is Number and isinstance(value, float) and value.is_integer():  # a table with gaps holds floats
            value = int(value)
        if value is None or not fits(value, takes):
            raise DataError(f"{name}: {argument}", value, words(takes), "correct kwargs of the row")
        values.append(value)
    return lambda text: check(text, *values)


# -- what the instructions count ---------------------------------------------------------------------------------------


def count_sentences(text: str) -> int:
    """Counts sentences; text after the last full stop counts as one more."""
    count, last = 0, 0
    for match in _END.finditer(text):
        stop, following = match[1], match[2]
        before = text[max(0, match.start() - 20) : match.start()]
        is_abbreviated = stop == "." and following and _ABBREVIATED.search(before)
        goes_on = following.islower() and not stop.strip(".") and (len(stop) > 1 or before[-1:].isdigit())
        if not is_abbreviated and not goes_on:
            count, last = count + 1, match.end()
    return count + bool(text[last:].strip())


def count_capital_words(text: str) -> int:
    """Counts the words in capital letters."""
    return sum(word.isupper() for word in _BETWEEN_WORDS.split(text))


def language_of(text: str) -> str | None:
    """Detects a text's language (ISO 639-1); None for a text without letters.  Raises: ModuleNotFoundError."""
    import langdetect

    langdetect.DetectorFactory.seed = 0  # else the same text may get two languages
    try:
        return str(langdetect.detect(text))
    except langdetect.LangDetectException:
        return None


def _find_langdetect(name: str) -> None:
    """Raises: ModuleNotFoundError if the instruction `name` needs langdetect and it is missing."""
    try:
        import langdetect  # noqa: F401
    except ModuleNotFoundError as error:
        change = f"install it with `{pip_install('langdetect')}`, or leave such rows out"
        raise DataError(name, "langdetect is missing, which finds the language of a response", change=change) from error


def _is_in(language: str, text: str) -> bool:
    return language_of(text) in (language, None)  # the authors accept a text without a language


def _compare(count: int, relation: str, limit: int) -> bool:
    return count < limit if relation == "less than" else count >= limit


def _find(pattern: str, text: str, flags: int = re.IGNORECASE) -> list[str]:
    try:
        return [match[0] for match in re.finditer(pattern, text, flags)]
    except re.error as error:
        expected = "a regular expression, as the keywords of IFEval are"
        raise DataError("keyword", f"{pattern!r} ({error})", expected, "escape it with \\") from error


def _paragraphs(text: str, num_paragraphs: int) -> bool:
    parts = [part.strip() for part in re.split(r"\s?\*\*\*\s?", text)]
    return all(parts[1:-1]) and sum(map(bool, parts)) == num_paragraphs


def _nth_paragraph(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    parts = text.split("\n\n")
    filled = sum(bool(part.strip()) for part in parts)
    if not (filled == num_paragraphs and 1 <= nth_paragraph <= filled and parts[nth_paragraph - 1].strip()):
        return False
    first = re.split(r"[.,?!'\"]", parts[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"'))[0]
    return first.lower() == first_word.lower()


def _highlights(text: str, num_highlights: int) -> bool:
    single = [each for each in _find(r"\*[^\n*]*\*", text) if each.strip("*").strip()]
    double = [each for each in _find(r"\*\*[^\n*]*\*\*", text) if each[2:-2].strip()]
    return len(single) + len(double) >= num_highlights


def _two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    filled = [part for part in parts if part]
    return all(parts[1:-1]) and len(filled) == 2 and filled[0] != filled[1]


def _is_json(text: str) -> bool:
    try:
        json.loads(_CODE_FENCE.sub("", text.strip()).strip())
    except (ValueError, RecursionError):
        return False
    return True


def _postscript(text: str, postscript_marker: str) -> bool:
    return bool(_find(_POSTSCRIPTS.get(postscript_marker, postscript_marker.lower()), text.lower()))


def _has_title(text: str) -> bool:
    inner = (line.partition("<<")[2].rpartition(">>")[0] for line in text.split("\n"))
    return any(each.lstrip("<").rstrip(">").strip() for each in inner)


def _quoted(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


# Types of arguments by name; the others are numbers.
TYPES: Mapping[str, Any] = {
    **dict.fromkeys(("keywords", "forbidden_words"), list[str]),
    **dict.fromkeys(("relation", "let_relation", "capital_relation"), Literal["less than", "at least"]),
    **dict.fromkeys(("keyword", "letter", "language", "first_word", "end_phrase"), str),
    **dict.fromkeys(("postscript_marker", "section_spliter", "prompt_to_repeat"), str),
}

# Each check gets the text, and the arguments of `kwargs` that its parameters name.
CHECKS: Mapping[str, Callable[..., bool]] = {
    "keywords:existence": lambda text, keywords: all(_find(key, text) for key in keywords),
    "keywords:frequency": lambda text, keyword, relation, frequency: _compare(
        len(_find(keyword.strip(), text)), relation, frequency
    ),
    "keywords:forbidden_words": lambda text, forbidden_words: (
        not any(_find(rf"\b{key}\b", text) for key in forbidden_words)
    ),
    "keywords:letter_frequency": lambda text, letter, let_relation, let_frequency: _compare(
        text.lower().count(letter.strip().lower()), let_relation, let_frequency
    ),
    "language:response_language": lambda text, language: _is_in(language, text),
    "length_constraints:number_sentences": lambda text, relation, num_sentences: _compare(
        count_sentences(text), relation, num_sentences
    ),
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_words": lambda text, relation, num_words: _compare(
        len(re.findall(r"\w+", text)), relation, num_words
    ),
    "length_constraints:nth_paragraph_first_word": _nth_paragraph,
    "detectable_content:number_placeholders": lambda text, num_placeholders: (
        sum("[" in part for line in text.split("\n") for part in line.split("]")[:-1]) >= num_placeholders
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": lambda text, num_bullets: (
        sum(len(_find(rf"^[^\S\n]*{mark}", text, re.MULTILINE)) for mark in (r"\*[^*].*$", "-.*$")) == num_bullets
    ),
    "detectable_format:constrained_response": lambda text: any(option in text for option in _OPTIONS),
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": lambda text, section_spliter, num_sections: (
        len(_find(rf"{section_spliter}\s?\d+", text, 0)) >= num_sections
    ),
    "detectable_format:json_format": _is_json,
    "detectable_format:title": _has_title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": lambda text, prompt_to_repeat: (
        text.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "startend:end_checker": lambda text, end_phrase: (
        text.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": _quoted,
    "change_case:capital_word_frequency": lambda text, capital_relation, capital_frequency: _compare(
        count_capital_words(text), capital_relation, capital_frequency
    ),
    "change_case:english_capital": lambda text: text.isupper() and _is_in("en", text),
    "change_case:english_lowercase": lambda text: text.islower() and _is_in("en", text),
    "punctuation:no_comma": lambda text: "," not in text,
}
