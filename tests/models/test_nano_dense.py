# SPDX-License-Identifier: Apache-2.0
"""Models without experts and states: trained, exported, loaded by transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.nano import DENSE, check_trains

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("model_type", DENSE)
def test_it_trains_and_is_exported(model_type: str, tmp_path: Path) -> None:
    check_trains(model_type, tmp_path)
