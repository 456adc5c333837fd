# SPDX-License-Identifier: Apache-2.0
"""Other rewards for mathematics: the verdict of `math` as +1 and -1, or in a sum with the format; math-verify alone."""

from __future__ import annotations

import threading
from typing import Literal

import math_verify.grader
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from whet.options import Share
from whet.registry import register_reward
from whet.rewards import math
from whet.rewards.shaping import has_format

math_verify.grader.TIMEOUT_WARNING_SHOWN = True  # it has no deadline outside the main thread, and would say so


@register_reward("math_verify")
def by_math_verify(solution_str: str, ground_truth: str | int | float) -> dict[str, float | str | None]:
    """1 where math-verify by itself, called as verl's `math_verify` calls it, finds the answer in a response equal to
    the ground truth, else 0: the boxed truth read as LaTeX, the response as an expression or LaTeX, six places.

    `math` is stricter, and reads more notations. `pred` is that of `math`.
    """
    seconds = 5 if threading.current_thread() is threading.main_thread() else None  # it needs signals
    truth = parse(rf"\boxed{{{ground_truth}}}", [LatexExtractionConfig()], parsing_timeout=seconds)
    found = parse(solution_str, [ExprExtractionConfig(), LatexExtractionConfig()], parsing_timeout=seconds)
    correct = bool(truth) and verify(truth, found, float_rounding=6, timeout_seconds=seconds)
    answer = math.extract_answer(solution_str)
    return {"reward": float(correct), "pred": answer and math.vote(answer)}


@register_reward("math_dapo", aliases=("aime",))
def math_dapo(
    solution_str: str, ground_truth: str | int | float, prompt_str: str = ""
) -> dict[str, float | str | None]:
    """1 where `math` finds the answer correct, else -1; the accuracy stays 1 and 0. `pred` is that of `math`.

    DAPO (arXiv:2503.14476) adds a penalty for length, which is `algorithm.overlong`.
    """
    found = math.compute_score(solution_str, ground_truth, prompt_str)
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

    The parts are `format`, and `pred` of `math`. `geo3k` wants a `\\boxed{}` after the thought, `r1v` an `<answer>`.
    """
    found = math.compute_score(solution_str, ground_truth, prompt_str)
    correct, shaped = float(found["reward"] == 1.0), float(has_format(solution_str, style))
    reward = (1 - format_weight) * correct + format_weight * shaped
    return {"reward": reward, "accuracy": correct, "format": shaped, "pred": found["pred"]}
