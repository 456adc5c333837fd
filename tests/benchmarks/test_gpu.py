# SPDX-License-Identifier: Apache-2.0
"""`make gpu`: what it says where there is no accelerator, and the page that it writes where there is one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_without_an_accelerator_it_says_so_and_is_content() -> None:
    before = gpu.PAGE.read_bytes() if gpu.PAGE.exists() else None
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu"], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, gpu.NONE_HERE + "\n")
    assert (gpu.PAGE.read_bytes() if gpu.PAGE.exists() else None) == before


def test_parts_are_run_cut_off_and_left_out() -> None:
    well = gpu.run("One", ("-c", "print('FOLDER'); import os; print(os.path.isdir('FOLDER'))"), 60.0)
    assert (well.ended, well.output) == ("ok", "FOLDER\nTrue\n")
    failed = gpu.run("Two", ("-c", "import sys; print('said'); sys.exit('why')"), 60.0)
    assert (failed.ended, failed.output) == ("failed with 1", "said\nwhy\n")
    cut = gpu.run("Three", ("-c", "import time; print('begun', flush=True); time.sleep(60)"), 3.0)
    assert (cut.ended, cut.output, cut.seconds < 30) == ("cut off", "begun\n", True)
    assert gpu.run("Four", ("-c", "1"), -1.0).ended == "left out, as the time was over"


def test_the_page() -> None:
    outcomes = [
        gpu.Outcome("Suites", "python -m pytest", 12.3, "ok", "\n".join(map(str, range(100)))),
        gpu.Outcome("Memory", "python -m memory", 4.0, "cut off", "| a |"),
    ]
    lines = gpu.page("- accelerator: a large one\n", outcomes).splitlines()
    assert lines[0] == "# On an accelerator" and "- accelerator: a large one" in lines
    assert "| Suites | 12 | ok |" in lines and "| Memory | 4 | cut off |" in lines
    assert "`python -m memory`" in lines and "99" in lines and "79" not in lines  # the end of what it wrote


def test_all_parts_have_time_and_the_quickstart_and_exactness_come_first() -> None:
    assert list(gpu.PARTS)[:2] == ["Quickstart", "Exactness"]
    assert all(seconds >= 60 for seconds, _ in gpu.PARTS.values())
    assert sum(seconds for seconds, _ in gpu.PARTS.values()) <= gpu.SECONDS == 590


def test_a_slow_part_is_cut_off_at_its_own_limit_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "PAGE", tmp_path / "gpu.md")
    monkeypatch.setattr(gpu, "facts", lambda device: "")
    monkeypatch.setattr(gpu.devices, "here", lambda: torch.device("meta"))
    slow, quick = (2.0, ("-c", "import time; time.sleep(60)")), (60.0, ("-c", "print('here')"))
    monkeypatch.setattr(gpu, "PARTS", {"Slow": slow, "Quick": quick})
    assert gpu.main() == 1
    lines = gpu.PAGE.read_text().splitlines()
    assert any(line.startswith("| Slow | ") and line.endswith(" | cut off |") for line in lines)
    assert any(line.startswith("| Quick | ") and line.endswith(" | ok |") for line in lines) and "here" in lines


def test_the_tests_that_need_an_accelerator_are_there() -> None:
    """All that are skipped without one, by the names that pytest is given."""
    skipped = re.compile(r"@pytest\.mark\.skipif\(\s*not torch\.cuda\.is_available\(\)(?:.|\n)*?\ndef (test_\w+)")
    files = [*(ROOT / "tests").rglob("test_*.py")]
    found = {f"{file.relative_to(ROOT)}::{name}" for file in files for name in skipped.findall(file.read_text("utf-8"))}
    assert found == set(gpu.NEED_ACCELERATOR)
