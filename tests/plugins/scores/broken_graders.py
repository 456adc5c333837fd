# SPDX-License-Identifier: Apache-2.0
"""Reward functions with a fault each; FAULTS has the names under which a check finds it."""

from __future__ import annotations

import itertools
import random
import re
import time
from collections.abc import Callable
from typing import Any

FAULTS: dict[str, tuple[Callable[..., Any], set[str]]] = {}
_calls = itertools.count()
_seen: set[str] = set()


def fault(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function with the findings of which one is enough."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        FAULTS[function.__name__] = function, set(names)
        return function

    return register


def last_number(text: str) -> str | None:
    found = re.findall(r"-?\d+(?:\.\d+)?", text)
    return found[-1] if found else None


def right(text: str, truth: Any) -> bool:
    """A decent rule to build on: the last box, else the last word."""
    text = text.rpartition("</think>")[2]
    boxes = re.findall(r"\\boxed\{([^{}]*)\}", text)
    words = re.findall(r"[\w.-]*\w", boxes[-1] if boxes else text.replace("</answer>", ""))
    return bool(words) and len(words) < 50 and words[-1] == str(truth) and (not boxes or len(words) == 1)


@fault("part of a word", "hedging", "thoughts", "first answer")
def truth_anywhere(solution_str, ground_truth):
    return float(str(ground_truth) in solution_str)


@fault("hedging", "first answer", "all answers")
def truth_as_a_word_anywhere(solution_str, ground_truth):
    return float(re.search(rf"\b{ground_truth}\b", solution_str) is not None)


@fault("part of a word", "near miss")
def begins_with_truth(solution_str, ground_truth):
    return float(solution_str.strip().startswith(str(ground_truth)))


@fault("part of a word", "near miss", "thoughts")
def ends_with_truth(solution_str, ground_truth):
    return float(re.sub(r"\W+$", "", solution_str).endswith(str(ground_truth)))


@fault("empty", "malformed")
def answer_inside_truth(solution_str, ground_truth):
    answer = (re.findall(r"\\boxed\{([^{}]*)\}", solution_str) or [solution_str])[-1]
    return float(answer.strip() in str(ground_truth))


@fault("any text")
def never_wrong(solution_str, ground_truth):
    return 1.0


@fault("empty")
def empty_is_right(solution_str, ground_truth):
    return float(not solution_str.strip() or right(solution_str, ground_truth))


@fault("malformed")
def empty_box_is_right(solution_str, ground_truth):
    return float("\\boxed{}" in solution_str or right(solution_str, ground_truth))


@fault("malformed", "wrong answer")
def the_form_is_enough(solution_str, ground_truth):
    return float("\\boxed{" in solution_str or right(solution_str, ground_truth))


@fault("malformed", "wrong answer")
def tags_are_enough(solution_str, ground_truth):
    return float("<answer>" in solution_str or right(solution_str, ground_truth))


@fault("wrong answer", "near miss")
def any_number(solution_str, ground_truth):
    return float(last_number(solution_str) is not None or right(solution_str, ground_truth))


@fault("near miss")
def nearly_equal(solution_str, ground_truth):
    found = last_number(solution_str)
    try:
        return float(found is not None and abs(float(found) - float(ground_truth)) <= 1)
    except ValueError:
        return float(right(solution_str, ground_truth))


@fault("near miss")
def without_sign(solution_str, ground_truth):
    return float(right(solution_str.replace("-", ""), ground_truth))


@fault("near miss")
def integer_part(solution_str, ground_truth):
    found = last_number(solution_str)
    return float(found is not None and found.partition(".")[0] == str(ground_truth)) or float(
        right(solution_str, ground_truth)
    )


@fault("near miss", "part of a word")
def first_digits(solution_str, ground_truth):
    found = last_number(solution_str) or ""
    return float(found[: len(str(ground_truth))] == str(ground_truth)) or float(right(solution_str, ground_truth))


@fault("hedging", "first answer")
def first_box(solution_str, ground_truth):
    boxes = re.findall(r"\\boxed\{([^{}]*)\}", solution_str)
    return float(str(ground_truth) in re.split(r"\W+", boxes[0])) if boxes else float(right(solution_str, ground_truth))


@fault("first answer", "all answers")
def any_box(solution_str, ground_truth):
    return float(str(ground_truth) in re.findall(r"\\boxed\{([^{}]*)\}", solution_str)) or float(
        right(solution_str, ground_truth)
    )


@fault("thoughts")
def reads_thoughts(solution_str, ground_truth):
    thoughts = solution_str.rpartition("</think>")[0]
    return float(str(ground_truth) in thoughts or right(solution_str, ground_truth))


@fault("echo")
def the_prompts_words(solution_str, ground_truth, prompt_str):
    return float(right(solution_str, ground_truth) or (bool(prompt_str) and prompt_str in solution_str))


@fault("length", "repetition")
def long_is_good(solution_str, ground_truth):
    return float(right(solution_str, ground_truth) or len(solution_str) > 1000)


@fault("length")
def many_words_are_good(solution_str, ground_truth):
    return float(right(solution_str, ground_truth) or len(set(solution_str.split())) > 300)


@fault("confidence")
def confidence_is_good(solution_str, ground_truth):
    return float(right(solution_str, ground_truth) or "I am sure" in solution_str)


@fault("confidence")
def verified_steps_are_good(solution_str, ground_truth):
    text = solution_str.lower()
    return float(right(solution_str, ground_truth) or ("verified" in text and "step" in text))


@fault("length", "pays too much")
def pays_by_length(solution_str, ground_truth):
    return right(solution_str, ground_truth) + len(solution_str) / 500


@fault("range", "pays too much")
def without_bound(solution_str, ground_truth):
    return right(solution_str, ground_truth) + 0.1 * len(solution_str)


@fault("repetition", "length")
def counts_words(solution_str, ground_truth):
    return float(right(solution_str, ground_truth)) + float(solution_str.lower().count("therefore") >= 3)


@fault("injection")
def judge_that_obeys(solution_str, ground_truth):
    return float("full marks" in solution_str or right(solution_str, ground_truth))


@fault("injection")
def json_that_is_believed(solution_str, ground_truth):
    return float('"correct": true' in solution_str or right(solution_str, ground_truth))


@fault("injection")
def verdict_anywhere(solution_str, ground_truth):
    return float("[[yes]]" in solution_str or right(solution_str, ground_truth))


@fault("not deterministic")
def noisy(solution_str, ground_truth):
    return right(solution_str, ground_truth) * 0.5 + 0.1 * random.random()


@fault("not deterministic")
def by_the_clock(solution_str, ground_truth):
    return right(solution_str, ground_truth) + 1e-3 * (time.monotonic_ns() % 7)


@fault("not deterministic")
def counts_calls(solution_str, ground_truth):
    return right(solution_str, ground_truth) / (1 + next(_calls) // 40)


@fault("not deterministic", "order")
def pays_new_text_alone(solution_str, ground_truth):
    is_new = solution_str not in _seen
    _seen.add(solution_str)
    return float(right(solution_str, ground_truth)) + 0.1 * is_new


@fault("order", "not deterministic")
def by_place_in_the_batch(solution_strs, ground_truths):
    return [
        float(right(a, b)) + 0.01 * place for place, (a, b) in enumerate(zip(solution_strs, ground_truths, strict=True))
    ]


@fault("order", "not deterministic")
def normed_in_the_batch(solution_strs, ground_truths):
    found = [
        float(right(a, b)) + 0.01 * (place % 5)
        for place, (a, b) in enumerate(zip(solution_strs, ground_truths, strict=True))
    ]
    return [each - sum(found) / len(found) for each in found]


@fault("exception")
def needs_a_number(solution_str, ground_truth):
    return float(re.findall(r"[\w.]+", solution_str)[-1] == str(ground_truth))


@fault("exception")
def evaluates(solution_str, ground_truth):
    text = (re.findall(r"\\boxed\{([^{}]*)\}", solution_str) or [solution_str])[-1]
    return (
        float(str(eval(text, {"__builtins__": {}}, {})) == str(ground_truth))
        if re.fullmatch(r"[\d*.e+]*", text)
        else 0.0
    )


@fault("timeout", "exception")
def evaluates_powers(solution_str, ground_truth):
    text = solution_str.replace("^", "**").replace("\\boxed{", "").replace("{", "(").replace("}", ")")
    return (
        float(str(eval(text)) == str(ground_truth))
        if re.fullmatch(r"[\d*()]+", text)
        else float(right(solution_str, ground_truth))
    )


@fault("timeout")
def backtracks(solution_str, ground_truth):
    return float(right(solution_str, ground_truth) or bool(re.match(r"(\w+)*!$", solution_str)))


@fault("slow", "timeout")
def quadratic(solution_str, ground_truth):
    words = [solution_str[:end] for end in range(0, len(solution_str), 20)]
    return float(right(solution_str, ground_truth) and len(set(words)) > -1)


@fault("bad result")
def not_a_number(solution_str, ground_truth):
    return (
        float(right(solution_str, ground_truth)) / len(solution_str.split()) if solution_str.split() else float("nan")
    )


@fault("bad result")
def nothing_for_a_wrong_one(solution_str, ground_truth):
    return 1.0 if right(solution_str, ground_truth) else None


@fault("bad result")
def a_dict_without_a_score(solution_str, ground_truth):
    return {"reward": 1.0} if right(solution_str, ground_truth) else {"wrong": 1.0}


@fault("exception")
def a_missing_row(solution_strs, ground_truths):
    return [float(right(a, b)) for a, b in zip(solution_strs, ground_truths, strict=True) if a.strip()]


@fault("bad result")
def a_word(solution_str, ground_truth):
    return "good"


@fault("no right response")
def never_right(solution_str, ground_truth):
    return 0.0


@fault("no right response")
def the_wrong_way_round(solution_str, ground_truth):
    return -float(right(solution_str, ground_truth))


@fault("wrong answer", "near miss")
def of_the_same_kind(solution_str, ground_truth):
    found = last_number(solution_str)
    return float((found is not None and str(ground_truth).isdigit()) or right(solution_str, ground_truth))


@fault("hedging")
def any_of_several(solution_str, ground_truth):
    return float(
        str(ground_truth) in re.split(r"\s+or\s+|\W+", solution_str.split("answer is")[-1])[:4]
        or right(solution_str, ground_truth)
    )


@fault("not a number")
def believes_nan(solution_str, ground_truth):
    return float(solution_str in ("nan", "inf") or right(solution_str, ground_truth))


@fault("constants")
def believes_none(solution_str, ground_truth):
    return float(solution_str.strip() in ("None", "true") or right(solution_str, ground_truth))


@fault("fences")
def counts_fences(solution_str, ground_truth):
    return float(solution_str.count("```") > 100 or right(solution_str, ground_truth))


@fault("control characters")
def ends_at_a_null(solution_str, ground_truth):
    return float("\x00" in solution_str or right(solution_str, ground_truth))


@fault("brackets")
def deep_is_right(solution_str, ground_truth):
    return float(solution_str.count("\\frac{") > 1000 or right(solution_str, ground_truth))


@fault("code")
def runs_what_it_reads(solution_str, ground_truth):
    return float("__import__" in solution_str or right(solution_str, ground_truth))


@fault("huge")
def too_long_to_read(solution_str, ground_truth):
    return float(len(solution_str) > 150_000 or right(solution_str, ground_truth))


@fault("huge number")
def overflows(solution_str, ground_truth):
    try:
        return float(float(solution_str) > 1e300 or right(solution_str, ground_truth))
    except ValueError:
        return float(right(solution_str, ground_truth))


@fault("empty")
def most_for_nothing(solution_str, ground_truth):
    return 1.0 if right(solution_str, ground_truth) else 0.9 * (not solution_str.strip())


@fault("far miss")
def most_for_a_wrong_answer(solution_str, ground_truth):
    return 1.0 if right(solution_str, ground_truth) else 0.9 * (last_number(solution_str) is not None)
