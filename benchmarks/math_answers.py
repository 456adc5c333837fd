# SPDX-License-Identifier: Apache-2.0
"""How many answers a second the math reward scores, against math-verify called one answer after the other."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import math_verify

from benchmarks.setting import Setting
from whet.rewards import math
from whet.rewards.pool import RewardPool
from whet.types import RewardItem

TITLE = "Mathematical answers"
NOTE = """\
Responses are the worked solutions of GSM8K with their last number in a box, and for the other problems a few lines that
end with the answer in a box: the right one for two of three, else that of another problem. "Symbols" are those of which
no answer is a number. The cache of parsed answers is emptied before each. math-verify parses both sides and compares
them, one response after the other, with its own deadlines; the pool has two processes. A ratio is of one round.
"""
DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
UNCACHED = """
from whet.rewards import math

def compute_score(solution_str, ground_truth):
    math._parse.cache_clear()
    return math.compute_score(solution_str, ground_truth)
"""
BOUNDS = {"GSM8K": 3.0, "MATH-500, AIME, DeepMath": 3.0, "of these, symbols": 1.7}


def responses(rows: int) -> dict[str, list[RewardItem]]:
    """The responses to score, by kind."""
    grade_school = [json.loads(line)["answer"] for line in (DATA / "gsm8k" / "test.jsonl").open()][:rows]
    items = []
    for number, text in enumerate(grade_school):
        work, _, answer = text.rpartition("#### ")
        truth = grade_school[number - 1 if number % 3 == 2 else number].rpartition("#### ")[2]
        items.append(RewardItem("gsm8k", rf"{work}So the answer is \boxed{{{answer}}}.", truth))
    read = [DATA / "math" / name for name in ("benchmarks.jsonl", "deepmath_1000.jsonl")]
    answers = sorted({str(json.loads(line)["answer"]) for path in read for line in path.open()})
    harder = []
    for number, answer in enumerate(answers):
        shown = answers[number - 1] if number % 3 == 2 else answer
        text = f"First we write $a = 2b + 1$ and note that $b^2 > 0$.\nThen $a + b = 3b + 1$.\n\\boxed{{{shown}}}"
        harder.append(RewardItem("math", text, answer))
    symbols = [each for each in harder if not math._NUMBER.fullmatch(math.normalise(each.ground_truth))]
    return {"GSM8K": items, "MATH-500, AIME, DeepMath": harder[:rows], "of these, symbols": symbols[:rows]}


def by_math_verify(items: list[RewardItem]) -> int:
    """The number of right answers, by math-verify as it comes."""
    right = 0
    for item in items:
        truth = math_verify.parse(f"${item.ground_truth}$")
        right += bool(math_verify.verify(truth, math_verify.parse(item.solution_str)))
    return right


def run(setting: Setting) -> dict[str, Any]:
    """Answers a second, by kind, way and round."""
    if not DATA.exists():
        return {}
    found: dict[str, Any] = {}
    file = setting.scratch / "uncached.py"
    file.write_text(UNCACHED)
    pool = RewardPool(f"{file}:compute_score", num_workers=2, timeout_seconds=30.0, correct_threshold=1.0)
    for kind, items in responses(400).items():

        def one_by_one(items: list[RewardItem] = items) -> None:
            for item in items:
                math._parse.cache_clear()
                math.compute_score(item.solution_str, item.ground_truth)

        ways: dict[str, Callable[[], Any]] = {
            "math-verify": lambda items=items: by_math_verify(items),
            "one after the other": one_by_one,
            "pool": lambda items=items: pool.score(items),
        }
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for way in ways.values():
            way()
        for _ in range(setting.scale.rounds):
            for name, way in ways.items():
                start = time.perf_counter()
                way()
                rates[name].append(len(items) / (time.perf_counter() - start))
        found[kind] = rates
    pool.close()
    return found


def report(results: Mapping[str, Any]) -> list[str]:
    """A table."""
    lines = [
        "| answers | math-verify | one after the other | pool | ratio (range) | at least |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for kind, rates in results["math_answers"].items():
        ratios = [ours / theirs for ours, theirs in zip(rates["pool"], rates["math-verify"], strict=True)]
        shown = " | ".join(f"{median(rates[way]):.0f}" for way in ("math-verify", "one after the other", "pool"))
        lines.append(
            f"| {kind} | {shown} | {median(ratios):.1f}x ({min(ratios):.1f} to {max(ratios):.1f}) | {BOUNDS[kind]}x |"
        )
    return lines
