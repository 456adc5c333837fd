# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from whet.plugins.sandbox.local import LocalSandbox

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


@pytest.fixture(scope="session")
def sandbox() -> Iterator[LocalSandbox]:
    """The sandbox of bubblewrap."""
    box = LocalSandbox()
    yield box
    box.close()


@pytest.fixture(scope="session")
def unisolated() -> Iterator[LocalSandbox]:
    """Resource limits alone."""
    box = LocalSandbox(isolated=False)
    yield box
    box.close()
