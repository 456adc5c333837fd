# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/rewards.md whose models learn from rewards, with fewer steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.plugins.sandbox.conftest import needs_bubblewrap

SECONDS = 900  # several times what a quiet machine takes
pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 30)]
ROOT = Path(__file__).parents[2]


def run_example(name: str, run_dir: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`python examples/NAME.py --run-dir RUN_DIR WORDS`, which succeeds."""
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), "--run-dir", str(run_dir), *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done


def history(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_weak_reward_is_hacked_and_its_repair_is_learned(tmp_path: Path) -> None:
    """A model that lists digits is paid more by the weak reward while fewer held-out answers are the sum."""
    done = run_example("hacked_reward", tmp_path / "hacked", "--steps", "100")
    weak, repaired = (history(tmp_path / "hacked" / "rl" / name) for name in ("weak", "repaired"))

    def ends(records: list[dict[str, Any]]) -> tuple[float, float, float, float]:
        """The mean reward of the first and last five steps, the first and last held-out accuracy."""
        rewards = [record["critic/score/mean"] for record in records if "critic/score/mean" in record]
        checked = [record["val/accuracy"] for record in records if "val/accuracy" in record]
        assert len(rewards) == 100 and len(checked) == 11
        return fmean(rewards[:5]), fmean(rewards[-5:]), checked[0], checked[-1]

    reward_before, reward_after, accuracy_before, accuracy_after = ends(weak)
    assert reward_after > reward_before + 0.2 and accuracy_after < accuracy_before - 0.2
    assert weak[-1]["val/reward_gap"] > 0.5
    assert sum("rollouts/jumps_" in line for line in done.stderr.split("\n")) == 1
    [*_, jumps] = sorted((tmp_path / "hacked" / "rl" / "weak" / "rollouts").glob("jumps_*.jsonl"))
    assert all(json.loads(line)["jump"] == 1.0 for line in jumps.read_text().splitlines())

    reward_before, reward_after, accuracy_before, accuracy_after = ends(repaired)
    assert reward_after > reward_before + 0.1 and accuracy_after > accuracy_before + 0.1
    assert repaired[-1]["val/reward_gap"] < 0.25
    told = [line.partition(":")[0] for line in done.stdout.splitlines() if line.startswith(("weak:", "repaired:"))]
    assert told == ["weak", "repaired"] and (tmp_path / "hacked" / "hacked_reward.png").stat().st_size > 10_000


@needs_bubblewrap
def test_one_model_learns_three_domains(tmp_path: Path) -> None:
    run_example("three_domains", tmp_path / "domains", "trainer.total_steps=80", "trainer.val_freq=80")
    first, *_, last = [record for record in history(tmp_path / "domains" / "rl") if "val/accuracy" in record]
    assert (first["step"], last["step"]) == (0, 80)
    for domain, gain in (("sums", 0.1), ("code", 0.15), ("words", 0.3)):
        assert last[f"val/{domain}/accuracy"] > first[f"val/{domain}/accuracy"] + gain, domain
    assert last["val/failures"] == 0
