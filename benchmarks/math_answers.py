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
from latex2sympy2_extended import latex2sympy2

from benchmarks.setting import Setting
from whet.rewards import math, math_read
from whet.rewards.pool import RewardPool
from whet.types import Failure, RewardItem

TITLE = "Mathematical answers"
NOTE = """\
Responses are the worked solutions of GSM8K with their last number in a box, and for the other problems a few lines that
end with the answer in a box: the right one for two of three, else that of another problem. MATH-500 is a response to
each problem; then follow the answers of MATH-500, AIME and DeepMath, each once (small numbers are the answers of most
problems, and few of the different answers), and last the answers that are no numbers. The cache of parsed answers is
emptied before each. math-verify parses both sides and compares them, one response after the other, with its own
deadlines; the pool has two processes. A ratio is of one round.
"""
DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
UNCACHED = """
from whet.rewards import math, math_read

def compute_score(solution_str, ground_truth):
    for cached in (math._parse, math_read.read, math_read.normalise):
        cached.cache_clear()
    return math.compute_score(solution_str, ground_truth)
"""
DIFFERENT = "each different answer"
BOUNDS = {"GSM8K": "3x", "MATH-500": "3x", DIFFERENT: "", "of these, symbols": "1.7x"}


def responses(rows: int) -> dict[str, list[RewardItem]]:
    """The responses to score, by kind."""
    grade_school = [json.loads(line)["answer"] for line in (DATA / "gsm8k" / "test.jsonl").open()][:rows]
    items = []
    for number, text in enumerate(grade_school):
        work, _, answer = text.rpartition("#### ")
        truth = grade_school[number - 1 if number % 3 == 2 else number].rpartition("#### ")[2]
        items.append(RewardItem("gsm8k", rf"{work}So the answer is \boxed{{{answer}}}.", truth))
    tested, others = (
        [json.loads(line) for line in (DATA / "math" / name).open()]
        for name in ("benchmarks.jsonl", "deepmath_1000.jsonl")
    )
    of_problems = [str(row["answer"]) for row in tested if row["source"] == "MATH-500"]
    different = _boxed(sorted({str(row["answer"]) for row in tested + others}))
    symbols = [each for each in different if math_read.number(math_read.normalise(each.ground_truth)) is None]
    return {
        "GSM8K": items,
        "MATH-500": _boxed(of_problems)[:rows],
        DIFFERENT: different[:rows],
        "of these, symbols": symbols[:rows],
    }


def _boxed(answers: list[str]) -> list[RewardItem]:
    """Responses with a box, the third, sixth, ... of which has the answer of the problem before."""
    items = []
    for number, answer in enumerate(answers):
        shown = answers[number - 1] if number % 3 == 2 else answer
        text = f"First we write $a = 2b + 1$ and note that $b^2 > 0$.\nThen $a + b = 3b + 1$.\n\\boxed{{{shown}}}"
        items.append(RewardItem("math", text, answer))
    return items


def by_math_verify(items: list[RewardItem]) -> int:
    """The number of right answers, by math-verify as it comes, with its own parser."""
    [latex2sympy2.PSParser] = math.TwoStageParser.__bases__
    right = 0
    for item in items:
        truth = math_verify.parse(f"${item.ground_truth}$")
        right += bool(math_verify.verify(truth, math_verify.parse(item.solution_str)))
    latex2sympy2.PSParser = math.TwoStageParser
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
                for cached in (math._parse, math_read.read, math_read.normalise):
                    cached.cache_clear()
                math.compute_score(item.solution_str, item.ground_truth)

        ways: dict[str, Callable[[], Any]] = {
            "math-verify": lambda items=items: by_math_verify(items),
            "one after the other": one_by_one,
            "pool": lambda items=items: pool.score(items),
        }
        assert not any(isinstance(each, Failure) for each in pool.score(items))
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
            f"| {kind} | {shown} | {median(ratios):.1f}x ({min(ratios):.1f} to {max(ratios):.1f}) | {BOUNDS[kind]} |"
        )
    return lines
