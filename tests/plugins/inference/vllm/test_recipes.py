# SPDX-License-Identifier: Apache-2.0
"""The recipe `quickstart_vllm` learns the quickstart's task as well as one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainers.quickstart_runs import assert_learns_as_well, make_task

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


def test_a_replica_that_samples_ahead_of_one_trainer(has_vllm: None, tmp_path: Path) -> None:
    assert_learns_as_well("quickstart_vllm", make_task(tmp_path / "quickstart"))
