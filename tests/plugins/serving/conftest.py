# SPDX-License-Identifier: Apache-2.0
"""Starts servers for tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from server_processes import ECHO, Running, Start, started


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts servers that end with the test."""
    with ExitStack() as stack:
        yield lambda *arguments: stack.enter_context(started(*arguments))


@pytest.fixture(scope="session")
def echo(qwen25_folder: Path) -> Iterator[Running]:
    """A server that repeats the user's message."""
    with started(qwen25_folder, "--name", "m", "--engine", ECHO) as running:
        yield running
