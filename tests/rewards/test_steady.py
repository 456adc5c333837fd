# SPDX-License-Identifier: Apache-2.0
"""A pool scores a hundred thousand answers as it scored the first ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.reward_load import AHEAD, ANSWERS, SECONDS, measure

START_SECONDS = 1.5  # for a process that takes the place of a hanging one, on a busy machine
GROWTH_MB = 4.0  # of one process between 20,000 and 100,000 answers; they are 200 MB as text and ids


@pytest.mark.slow
def test_a_hundred_thousand_answers(tmp_path: Path) -> None:
    found = measure(ANSWERS, tmp_path)
    assert found["wrong"] == 0  # none lost, in order, and no answer failed with another one
    assert (found["raised"], found["hung"], found["ended"]) == (ANSWERS // 1000, 5, 5)
    assert found["answers"] == [20_000, 40_000, 60_000, 80_000, 100_000]
    trainer, processes = found["trainer_mb"], found["processes_mb"]
    assert trainer[-1] - trainer[0] < GROWTH_MB, trainer
    assert max(processes[-1]) - max(processes[0]) < GROWTH_MB, processes
    # Both processes may hang at once; then nothing is scored until the first deadline, and another process starts.
    assert found["longest_pause_seconds"] < SECONDS + START_SECONDS, found["longest_pause_seconds"]
    # A batch waits for those before it, and one hanging answer is in five of those that wait together.
    assert found["longest_seconds"] < SECONDS + 8.0, (found["longest_seconds"], AHEAD)
