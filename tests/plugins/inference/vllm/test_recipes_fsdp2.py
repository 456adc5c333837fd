# SPDX-License-Identifier: Apache-2.0
"""The recipe `quickstart_vllm_fsdp2` learns the quickstart's task as well as one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainers.quickstart_runs import assert_learns_as_well, make_task

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


def test_a_replica_beside_each_of_two_ranks(has_vllm: None, tmp_path: Path) -> None:
    """Each step's responses are trained on three times, so that 100 steps (of five seconds) learn enough."""
    task = make_task(tmp_path / "quickstart")
    assert_learns_as_well("quickstart_vllm_fsdp2", task, "actor.epochs=3", steps=100)
