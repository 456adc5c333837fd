# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from whet import errors
from whet.errors import pip_install


def test_an_extra_is_installed_from_where_whet_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(errors, "CHECKOUT", tmp_path)
    assert pip_install("ray") == "pip install 'whet[ray]'"  # site-packages
    (tmp_path / "pyproject.toml").touch()
    assert pip_install("ray") == "pip install -e '.[ray]'"
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert pip_install("ray") == f"pip install -e '{tmp_path}[ray]'"
