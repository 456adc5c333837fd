# SPDX-License-Identifier: Apache-2.0
"""Models with convolutions, recurrences or linear attention."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.nano import WITH_STATES, check_trains

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("model_type", WITH_STATES)
def test_it_trains_and_is_exported(model_type: str, tmp_path: Path) -> None:
    check_trains(model_type, tmp_path)
