# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.first import first
from whet.plugins.scores.check import CheckedPrompt, check
from whet.plugins.scores.code import compute_score
from whet.plugins.scores.hostile_programs import programs
from whet.rewards.pool import RewardPool

SQUARE = "```python\ndef f(x):\n    return x * x\n```"
TRUTHS: dict[str, Any] = {
    "stdin": {"inputs": ["3"], "outputs": ["6"]},
    "call": {"inputs": [[2]], "outputs": [4], "fn_name": "f"},
    "method": {"inputs": [[2]], "outputs": [4], "fn_name": "Solution.f"},
    "assertions": ["assert abs(f(3) - 9) < 1e-6"],
    "check": {"test": "def check(c):\n    assert sorted([c(2), c(1)]) == [1, 4]", "entry_point": "f"},
    "pytest": {"pytest": "from solution import f\n\ndef test_f():\n    assert f(2) == 4\n"},
}


@pytest.mark.parametrize("kind", first(1, TRUTHS, others=pytest.mark.slow))
def test_code_pays_no_hostile_program(kind: str) -> None:
    python = sys.executable if kind == "pytest" else None
    found = [*programs(TRUTHS[kind], {})]
    assert len(found) == 6 and all(each.startswith("```python\n") for each in found)
    for program in found:
        assert compute_score(program, TRUTHS[kind], sandbox="unisolated", python=python)["reward"] == 0.0, program


OTHERS = ["42", "Paris", "B", None, ["Paris", "paris"], {"target": ["a"]}, [{"box": [1]}], {"inputs": 3, "outputs": 3}]


@pytest.mark.parametrize("truth", OTHERS)
def test_other_ground_truths_are_no_tests(truth: Any) -> None:
    assert not [*programs(truth, {})]


def exit_code(solution_str: str, ground_truth: Any) -> float:
    """Runs the code and its tests in one process: a program that exits with success, or replaces functions of the
    tests, is paid."""
    code = solution_str.removeprefix("```python\n").removesuffix("```") + "\n" + "\n".join(ground_truth)
    done = subprocess.run([sys.executable, "-I", "-"], input=code.encode(errors="replace"), capture_output=True)
    return float(done.returncode == 0)


@pytest.mark.slow
def test_a_grader_that_believes_the_exit_code_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    row = CheckedPrompt("Square with f.", TRUTHS["assertions"], SQUARE)
    paid = [exit_code(program, row.truth) for program in row.programs]
    assert paid == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]  # leaves, leaves, equals all, shadows; no file is read or written
    with RewardPool(exit_code, num_workers=2, timeout_seconds=20.0, correct_threshold=1.0) as pool:
        report = check(pool, [row], reads_truth=True)
    assert "hostile program" in {each.name for each in report.findings}
    assert (report.lowest, report.highest) == (0.0, 1.0)


@pytest.mark.slow
def test_a_row_without_a_right_program_is_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As rows of a file are: the usual range of rewards is taken."""
    monkeypatch.chdir(tmp_path)
    row = CheckedPrompt("Square with f.", TRUTHS["assertions"])
    with RewardPool(exit_code, num_workers=2, timeout_seconds=20.0, correct_threshold=1.0) as pool:
        report = check(pool, [row], reads_truth=True)
    assert "hostile program" in {each.name for each in report.findings}
