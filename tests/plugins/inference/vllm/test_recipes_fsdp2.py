# SPDX-License-Identifier: Apache-2.0
"""The recipe `quickstart_vllm_fsdp2` learns the quickstart's task as well as one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainers.quickstart_runs import assert_learns_as_well, make_task

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


def test_a_replica_beside_each_of_two_ranks(has_vllm: None, tmp_path: Path) -> None:
    """Steps (of five seconds) are few; four epochs, a short warmup and a higher clip learn more from each."""
    task = make_task(tmp_path / "quickstart")
    more = ("actor.epochs=4", "actor.optim.warmup_steps=3", "algorithm.loss_options.clip_ratio_high=0.3")
    assert_learns_as_well("quickstart_vllm_fsdp2", task, *more, steps=110)
