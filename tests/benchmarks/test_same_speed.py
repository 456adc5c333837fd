# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.competitor import ROOT
from benchmarks.revision import CommandError, finish_measured
from benchmarks.same_speed import is_larger, is_slower, lower_bound, main, seconds_of

RATIOS = [1.09, 1.01, 1.02, 1.08, 1.04, 1.05, 1.07, 1.06, 1.03]


def test_the_lower_bound_is_an_order_statistic() -> None:
    # Nine fair coins: fewer than 2 heads in 1 + 9 = 10 of 512 cases (2.0 %), fewer than 3 in 46 (9.0 %): the second.
    assert lower_bound(RATIOS) == 1.02
    assert lower_bound(RATIOS, confidence=0.90) == 1.03
    # Five: none in 1 of 32 (3.1 %). Four: in 1 of 16 (6.3 %), which is too many.
    assert lower_bound(RATIOS[:5]) == 1.01
    assert lower_bound(RATIOS[:4]) is None and lower_bound([]) is None
    # Fifteen: fewer than 4 in 1 + 15 + 105 + 455 = 576 of 32,768 (1.8 %), fewer than 5 in 1,941 (5.9 %): the fourth.
    assert lower_bound([float(n) for n in range(15)]) == 3.0


def test_slower_means_that_the_bound_is_over_the_limit() -> None:
    assert not is_slower(RATIOS)  # the median is 1.05, and may be 1.02
    assert is_slower([1.01, *(1.04 for _ in range(8))])
    assert not is_slower([1.01, 1.03, *(1.5 for _ in range(7))])
    assert not is_slower([2.0, 2.0])  # too few to say


def test_memory_may_grow_by_the_larger_of_both_limits() -> None:
    mib = 2**20
    assert not is_larger(500 * mib, 529 * mib)  # 5.8 %, 29 MiB
    assert not is_larger(4000 * mib, 4079 * mib)  # 1.98 %, 79 MiB
    assert is_larger(500 * mib, 531 * mib) and is_larger(4000 * mib, 4081 * mib)
    assert not is_larger(500 * mib, 300 * mib)


def test_the_first_steps_do_not_count(tmp_path: Path) -> None:
    lines = [{"step": step, "time/update": float(seconds)} for step, seconds in enumerate([9, 9, 1, 5, 3], start=1)]
    (tmp_path / "timings.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert seconds_of(tmp_path, ["time/update"]) == {"time/update": 3.0}
    assert seconds_of(tmp_path, ["time/actor"], {"time/actor": "time/update"}) == {"time/actor": 3.0}


@pytest.mark.slow
def test_the_peak_of_memory_is_the_processes_own(tmp_path: Path) -> None:
    def ran(code: str) -> int:
        return finish_measured(subprocess.Popen([sys.executable, "-c", code]), tmp_path).peak_bytes

    mib = 2**20
    # Linux counts a process from the size of the one that starts it: sizes beyond that.
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024 + 100
    small, large = (ran(f"held = bytearray(b'1') * ({size} * {mib})") for size in (own, own + 80))
    assert 75 * mib < large - small < 85 * mib
    (tmp_path / "log").write_text("why\n")
    with pytest.raises(CommandError, match=r"(?s)exit status: 3; the end of .*why"):
        ran("raise SystemExit(3)")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_commit_is_as_fast_as_itself(capsys: pytest.CaptureFixture[str]) -> None:
    """One pair says nothing about speed: it shows that all runs."""
    assert main(["--before", str(ROOT), "--after", str(ROOT), "--pairs", "1", "--quick"]) == 0
    shown = capsys.readouterr().out.splitlines()
    names = [tuple(line.split()[:2]) for line in shown[:7]]
    assert names == [
        *(("long", "time/rollout"), ("long", "time/update"), ("long", "peak")),
        *(("quickstart", "time/step"), ("quickstart", "peak")),
        *(("import", "cpu"), ("child", "cpu")),
    ]
    assert "as fast" in shown[7]
