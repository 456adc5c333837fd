# SPDX-License-Identifier: Apache-2.0
"""Where `math` and math-verify, as it comes, disagree: `python -m tests.rewards.math_disagreements [EVERY]` prints the
table of docs/rewards.md, of every so many-th answer of the data sets: cause, count, example."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import math_verify

from tests.rewards.math_forms import forms, near_misses, texts
from tests.rewards.test_math_answers import _answers, _gsm8k_numbers, math_verify_says
from whet.rewards.math import compute_score, extract_answer, normalise

Case = tuple[str, str, bool, bool]  # response, ground truth, paid by math, accepted by math-verify
_SUM = re.compile(r"[\d})]\s?[-+*]|\\cdot|\)\s?\(|\d\(")


# The first cause whose rule holds counts. A rule gets the response, its answer and the ground truth.
CAUSES: dict[str, Callable[[str, str, str], bool]] = {
    "`\\fbox{}`": lambda text, answer, truth: text.startswith(r"\fbox"),
    "`<answer>` tag": lambda text, answer, truth: text.startswith("<answer>"),
    'expression without dollar signs after "Answer:"': lambda text, answer, truth: text.startswith("**Answer"),
    "full stop inside of the box": lambda text, answer, truth: answer.endswith("."),
    "percent for a fraction": lambda text, answer, truth: answer.endswith("%") != truth.endswith("%"),
    "remark or unit behind a number": lambda text, answer, truth: r"\text{ " in answer or r"\mbox" in answer,
    "name on the right, `5 = x`": lambda text, answer, truth: re.search(r"= x$", answer) is not None,
    "chain of inequalities for an interval": lambda text, answer, truth: "<" in answer,
    "base of a number": lambda text, answer, truth: re.search(r"\d_", truth) is not None,
    "equation of another number": lambda text, answer, truth: re.match(r"-?[\d./]+ = ", answer) is not None,
    "list for a number": lambda text, answer, truth: re.search(r"^\[|^([^,]*),\1$", answer) is not None,
    "sum or product that is not worked out": lambda text, answer, truth: _SUM.search(answer) is not None,
    "notation of the table above": lambda text, answer, truth: (
        normalise(answer) != " ".join(answer.split()) or normalise(truth) != " ".join(truth.split())
    ),
    "other": lambda text, answer, truth: True,
}


def cause(text: str, truth: str) -> str:
    """The cause of a disagreement about a response."""
    answer = extract_answer(text, truth) or ""
    return next(name for name, holds in CAUSES.items() if holds(text, answer, truth))


def _cases(truth: str) -> list[Case]:
    return list(_right(truth)) + list(_wrong(truth))


def _right(truth: str) -> Iterator[Case]:
    for text in (*texts(truth), *(rf"\boxed{{{form}}}" for form in forms(truth))):
        peer = math_verify.verify(math_verify.parse(f"${truth}$"), math_verify.parse(text))
        yield text, truth, compute_score(text, truth)["reward"] == 1.0, bool(peer)


def _wrong(truth: str) -> Iterator[Case]:
    for answer in near_misses(truth):
        text = rf"\boxed{{{answer}}}"
        yield text, truth, compute_score(text, truth)["reward"] == 1.0, bool(math_verify_says(answer, truth))


def table(cases: list[Case]) -> list[str]:
    """The lines of the table, by who accepts and by count."""
    lines = ["| accepted by | cause | count | example, for the ground truth |", "|---|---|--:|---|"]
    for name, ours in (("`math` alone", True), ("math-verify alone", False)):
        found: dict[str, list[Case]] = {}
        for case in cases:
            if case[2] is ours and case[3] is not ours:
                found.setdefault(cause(case[0], case[1]), []).append(case)
        for why, some in sorted(found.items(), key=lambda each: (each[0] == "other", -len(each[1]))):
            text, truth = min(((case[0], case[1]) for case in some), key=lambda pair: len(pair[0]) + len(pair[1]))
            shown = " ".join(text.split()).replace("|", "\\|")
            lines.append(f"| {name} | {why} | {len(some)} | `{shown}`, `{truth}` |")
    return lines


if __name__ == "__main__":
    every = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    chosen = [*_answers(), *_gsm8k_numbers()][::every]
    with ProcessPoolExecutor(2) as pool:
        found = [case for cases in pool.map(_cases, chosen) for case in cases]
    agreed = sum(ours is peer for _, _, ours, peer in found)
    sys.stdout.write("\n".join(table(found)) + f"\n\n{len(chosen)} answers: {len(found)} responses, {agreed} agreed\n")
