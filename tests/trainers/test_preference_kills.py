# SPDX-License-Identifier: Apache-2.0
"""A run of `whet preference` that is killed three times ends with the bits of one that never was."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainers.killed_runs import check_survives_kills

CHANGES = [["loss=dpo"], ["loss=kto", "reference.mode=cached"], ["loss=bco", "reference.update_steps=3"]]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("changes", CHANGES, ids=" ".join)
def test_a_preference_run_survives_kills(changes: list[str], model_folder: Path, tmp_path: Path) -> None:
    pairs = [("aab", "bb"), ("aaba", "cbacb"), ("baa", "b")]
    rows = [{"prompt": f"say {x}=", "chosen": good, "rejected": bad} for x in "xyzuv" for good, bad in pairs]
    check_survives_kills(tmp_path, ["preference", f"model.path={model_folder}", *changes], rows)
