# SPDX-License-Identifier: Apache-2.0
"""Models with a mixture of experts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.nano import WITH_EXPERTS, check_trains

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("model_type", WITH_EXPERTS)
def test_it_trains_and_is_exported(model_type: str, tmp_path: Path) -> None:
    check_trains(model_type, tmp_path)
