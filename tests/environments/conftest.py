# SPDX-License-Identifier: Apache-2.0
"""Lets programs that tests start find whet and the environments of examples/, as pytest's own process does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="package", autouse=True)
def found_by_programs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(ROOT), str(ROOT / "examples" / "environments"), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        yield
