# SPDX-License-Identifier: Apache-2.0
"""Clients beside each other and beside hostile ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.tinker_clients import CLIENTS, measure
from whet.plugins.lessons.init_model import init_model


@pytest.mark.slow
def test_no_client_changes_a_number_of_another(tmp_path: Path) -> None:
    """The losses of 17 clients with one seed; an adapter takes less memory than the base."""
    found = measure(init_model(tmp_path / "nano", "qwen3", "nano", num_layers=2), tmp_path, 2)
    assert found["is_equal"] and found["losses"][0] > found["losses"][1] > 0
    assert set(found["rates"]) == {"1", str(CLIENTS), "hostile"} and all(found["rates"].values())
