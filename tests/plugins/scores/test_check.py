# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from tests.plugins.scores.broken_graders import FAULTS, right
from whet.cli.app import main
from whet.plugins.scores.check import ROWS, CheckedPrompt, check, shorten
from whet.registry import REQUIRED, REWARDS, Entry
from whet.rewards.pool import RewardPool

ROOT = Path(__file__).resolve().parents[3]
BROKEN = "tests/plugins/scores/broken_graders.py"


def found_in(function: str, reads_truth: bool = True) -> set[str]:
    pool = RewardPool(function, num_workers=1, timeout_seconds=3.0, correct_threshold=1.0)
    with pool:
        report = check(pool, ROWS, reads_truth=reads_truth)
    return {finding.name for finding in report.findings}


def test_there_are_enough() -> None:
    assert len(FAULTS) >= 40
    assert all(inspect.isfunction(function) for function, _ in FAULTS.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hedging", "echo", "huge", "far miss"])
def test_findings(name: str) -> None:
    grader = next(grader for grader, (_, names) in FAULTS.items() if name in names)
    assert FAULTS[grader][1] & found_in(f"{BROKEN}:{grader}")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_grader_is_caught_by_name(name: str) -> None:
    assert FAULTS[name][1] & found_in(f"{BROKEN}:{name}")


def test_a_grader_that_never_scores_is_found_for_that_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check-reward", f"{BROKEN}:a_word"])
    out = capsys.readouterr().out
    assert ended.value.code == 1 and "rewards    none\n" in out and "findings   1\n" in out
    assert re.match(r"bad result  .*'good' \(str\)", out)


def test_a_file_without_rows_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(SystemExit) as ended:
        main(["check-reward", f"{BROKEN}:a_word", "--data", str(tmp_path / "empty.jsonl")])
    assert ended.value.code == 2 and "empty.jsonl" in capsys.readouterr().err


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "entry",
    [entry for entry in REWARDS if entry.alias_of is None and REQUIRED not in entry.options.values()],
    ids=lambda entry: entry.name,
)
def test_no_shipped_function_is_caught(entry: Entry, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check-reward", entry.name, *(["--option", "sandbox=unisolated"] if entry.name == "code" else [])])
    printed = capsys.readouterr().out
    # The library math-verify takes four times as long for twice as many nested boxes, which may be its only finding.
    is_slow = entry.name == "math_verify" and re.findall(r"^findings +(\d+)$", printed, re.MULTILINE) == ["1"]
    assert ended.value.code in (0, None) or (is_slow and printed.startswith("slow")), printed


ON_ROWS = [
    ("gsm8k", "gsm8k/test.jsonl", "question"),
    ("math_dapo", "math/benchmarks.jsonl", "prompt"),
    ("geo3k", "math/deepmath_1000.jsonl", "prompt"),
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("function", "file", "prompt_key"), ON_ROWS, ids=lambda value: str(value).partition("/")[0])
def test_no_shipped_function_is_caught_on_published_rows(
    function: str, file: str, prompt_key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ROOT.parent / "shared" / "data" / file
    if not path.exists():
        pytest.skip(f"{path} is not there")
    with pytest.raises(SystemExit) as ended:
        main(["check-reward", function, "--data", str(path), "--prompt-key", prompt_key, "--rows", "40"])
    assert ended.value.code in (0, None), capsys.readouterr().out


def test_a_row_as_published_has_its_answer_behind_the_mark() -> None:
    assert CheckedPrompt("?", "1 + 2 = 3\n#### 3").answer == CheckedPrompt("?", 3).answer == "3"


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "What is 3 + 4?", "answer": "7"}\n{"question": "And 5 + 6?", "answer": "11"}\n')
    given = ["--data", str(rows), "--prompt-key", "question"]
    with pytest.raises(SystemExit) as ended:
        main(["check-reward", f"{BROKEN}:truth_anywhere", *given])
    out = capsys.readouterr().out
    assert ended.value.code == 1
    assert "hedging  it pays several answers of which one is right\n    It is 7 or 8.\n" in out
    assert "findings   " in out and "for 2 rows" in out and "paid forms of the ground truth: alone, boxed" in out
    with pytest.raises(SystemExit) as ended:
        main(["check-reward", "gsm8k", *given, "--option", "method=strict"])
    assert ended.value.code in (0, None) and "after ####" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["check-reward", "gsm8k", "--data", str(rows)])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert all(name in said for name in ("prompt", "question, answer", "--prompt-key"))
    with pytest.raises(SystemExit) as ended:
        main(["check-reward", "gsm8k", "--option", "methods=strict"])
    assert ended.value.code == 2
