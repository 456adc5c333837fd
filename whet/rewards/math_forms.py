# SPDX-License-Identifier: Apache-2.0
"""Other rewards for the verdict of `math`: +1 and -1, and a weighted sum with the format."""

from __future__ import annotations

from typing import Literal

from whet.options import Share
from whet.registry import register_reward
from whet.rewards import math
from whet.rewards.shaping import has_format


@register_reward("math_dapo", aliases=("aime",), examples=((r"So \boxed{7}", "7", 1.0), ("Answer: 8", "7", -1.0)))
def math_dapo(
    solution_str: str, ground_truth: str | int | float, prompt_str: str = ""
) -> dict[str, float | str | None]:
    """1 where `math` finds the answer correct, else -1; the accuracy stays 1 and 0. `pred` is that of `math`.

    DAPO (arXiv:2503.14476) adds a penalty for length, which is `algorithm.overlong`.
    """
    found = math.compute_score(solution_str, ground_truth, prompt_str)
    correct = float(found["reward"] == 1.0)
    return {"reward": 2 * correct - 1, "acc": correct, "pred": found["pred"]}


@register_reward(
    "geo3k",
    aliases={"r1v": {"format_weight": 0.5, "style": "answer"}},
    examples=((r"<think>3 + 4</think><answer>\boxed{7}</answer>", "7", 1.0), ("It is 8.", "7", 0.0)),
)
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
