# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from tests.changed import chosen, mirror_of


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The test files of a small project."""
    for name in ("algorithms/test_kl.py", "config/test_keys.py", "test_batch.py", "benchmarks/test_floors.py"):
        file = tmp_path / "tests" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return tmp_path


@pytest.mark.parametrize(
    ("path", "tests"),
    [
        ("whet/algorithms/kl.py", "tests/algorithms/test_kl.py"),
        ("whet/batch.py", "tests/test_batch.py"),
        ("whet/config/schema.py", "tests/config"),  # no test file of its name
        ("whet/config/deep/deeper/file.py", "tests/config"),
        ("benchmarks/floors.py", "tests/benchmarks/test_floors.py"),
        ("tests/config/test_keys.py", "tests/config/test_keys.py"),
        ("tests/config/test_deleted.py", None),
        ("tests/config/conftest.py", "tests/config"),
        ("tests/conftest.py", None),
        ("whet/errors.py", None),
        ("README.md", "tests/test_readme.py"),
        ("docs/cluster.md", None),
    ],
)
def test_a_changed_file_has_its_tests(path: str, tests: str | None, root: Path) -> None:
    assert mirror_of(path, root) == tests


def test_each_is_named_once_and_the_architecture_always(root: Path) -> None:
    assert chosen([], root) == ["tests/test_architecture.py"]
    assert chosen(["whet/config/schema.py", "whet/config/keys.py", "whet/config/load.py"], root) == [
        *("tests/config", "tests/config/test_keys.py", "tests/test_architecture.py"),
    ]
