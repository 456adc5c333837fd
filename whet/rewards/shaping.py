# SPDX-License-Identifier: Apache-2.0
"""Score functions for the form of a response. List them beside a function that scores the answer:
`reward.function=[math,format,ngram_repetition]`. `algorithm.overlong` is DAPO's penalty for length."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from typing import Any, Literal

from whet.errors import ConfigError
from whet.options import Count, Number
from whet.registry import register_reward

_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\s\u3040-\u30ff\u3400-\u9fff]+")
_MARKUP = re.compile(r"\\[a-zA-Z]+|</?\w{1,20}>")
# First words of the Unicode names of a script's letters, where they are not the name of the script.
_NAMES = {"LATIN": {"LATIN", "FULLWIDTH"}, "HAN": {"CJK"}, "JAPANESE": {"CJK", "HIRAGANA", "KATAKANA"}}


@register_reward("ngram_repetition")
def ngram_repetition(solution_str: str, *, n: Count = 3) -> float:
    """Minus the share of word n-grams that repeat an earlier one; 0 for fewer than n words.

    Words are split at white space; each Chinese or Japanese character is a word. Yeo et al. 2025, arXiv:2502.03373.
    """
    words = _WORD.findall(solution_str.lower())
    grams = list(zip(*(words[start:] for start in range(n)), strict=False))
    return len(set(grams)) / len(grams) - 1 if grams else 0.0


@register_reward("length")
def length(reward_input: dict[str, Any], *, shortest: Number = 0, longest: Count = 1024) -> float:
    """0 for a response of `shortest` to `longest` tokens, else -min(1, relative distance to that limit)."""
    tokens = int(reward_input["response_length"])
    if tokens < shortest:
        return tokens / shortest - 1
    return -min(1.0, max(0, tokens - longest) / longest)


@register_reward("format")
def format_score(
    solution_str: str, *, style: Literal["answer", "boxed"] = "answer", opened: bool = False, pattern: str | None = None
) -> float:
    """1 if the response has the format, else 0.

    The format is `<think>...</think>`, then `<answer>...</answer>` and nothing else, or with `style=boxed` text with a
    `\\boxed{}`; each tag occurs once. With `opened`, the prompt ends in `<think>`. A `pattern`, a regular expression
    that must match the whole stripped response, replaces this rule.
    Raises: ValueError for a wrong pattern.
    """
    if pattern is None:
        return float(has_format(f"<think>{solution_str}" if opened else solution_str, style))
    try:
        return float(re.fullmatch(pattern, solution_str.strip(), re.DOTALL) is not None)
    except re.error as error:
        raise ConfigError("pattern", f"{pattern!r} ({error})", "a regular expression", "correct the option") from error


@register_reward("language")
def language(
    solution_str: str,
    *,
    script: Literal[
        "latin", "cyrillic", "greek", "arabic", "hebrew", "devanagari", "thai", "hangul", "han", "japanese"
    ] = "latin",
) -> float:
    """The share of a response's letters that belong to `script`; 1 without letters, 0 for an empty response.

    LaTeX commands and tags do not count. DeepSeek-R1's language consistency, arXiv:2501.12948, by script."""
    letters = Counter(each for each in _MARKUP.sub(" ", solution_str) if each.isalpha())
    if not letters:
        return float(bool(solution_str.strip()))
    names = _NAMES.get(script.upper(), {script.upper()})
    own = sum(count for each, count in letters.items() if unicodedata.name(each, "").partition(" ")[0] in names)
    return own / letters.total()


def has_format(text: str, style: str) -> bool:
    """Tells whether a text is `<think>...</think>`, then `<answer>` (style "answer") or text with a box ("boxed")."""
    text = text.strip()
    rest = text.partition("</think>")[2].strip()
    if not text.startswith("<think>") or text.count("<think>") != 1 or text.count("</think>") != 1:
        return False
    if style == "boxed":
        return "}" in rest.partition("\\boxed{")[2]
    is_whole = rest.startswith("<answer>") and rest.endswith("</answer>")
    return is_whole and rest.count("<answer>") == rest.count("</answer>") == 1
