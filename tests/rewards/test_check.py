# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import inspect

import pytest

from tests.rewards.broken_graders import FAULTS, right
from whet.rewards.check import ROWS, check, shorten
from whet.rewards.pool import RewardPool

BROKEN = "tests/rewards/broken_graders.py"


def found_in(function: str, reads_truth: bool = True) -> set[str]:
    pool = RewardPool(function, num_workers=1, timeout_seconds=3.0, correct_threshold=1.0)
    with pool:
        report = check(pool, ROWS, reads_truth=reads_truth)
    return {finding.name for finding in report.findings}


def test_there_are_enough() -> None:
    assert len(FAULTS) >= 40
    assert all(inspect.isfunction(function) for function, _ in FAULTS.values())


@pytest.mark.parametrize("name", ["hedging", "echo"])
def test_findings(name: str) -> None:
    grader = next(grader for grader, (_, names) in FAULTS.items() if name in names)
    assert FAULTS[grader][1] & found_in(f"{BROKEN}:{grader}")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_grader_is_caught_by_name(name: str) -> None:
    assert FAULTS[name][1] & found_in(f"{BROKEN}:{name}")


def test_a_decent_rule_has_no_finding() -> None:
    with RewardPool(right_or_not, num_workers=1, timeout_seconds=5.0, correct_threshold=1.0) as pool:
        report = check(pool, ROWS, reads_truth=True)
    assert not report.findings, report.findings
    assert {"alone", "boxed", "after ####", "in <answer>"} <= set(report.forms)
    assert (report.lowest, report.highest) == (0.0, 1.0) and report.responses > 300


def right_or_not(solution_str: str, ground_truth: str) -> float:
    return float(right(solution_str, ground_truth))


def test_shorten() -> None:
    assert shorten("a\nb") == "a\\nb" and shorten("x" * 100) == f"{'x' * 60}... (100 characters)"
