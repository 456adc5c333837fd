# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

from tests.test_distribution import installed_by_name
from whet import errors
from whet.errors import pip_install


@dataclass
class Installed:
    """A distribution that says where it was installed from."""

    told: str | None

    def read_text(self, name: str) -> str | None:
        return self.told


def test_an_extra_is_installed_from_where_whet_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(errors, "CHECKOUT", tmp_path)
    monkeypatch.setattr(metadata, "distribution", lambda name: Installed(told))
    wheel = tmp_path / "a b" / "whet_rl-0.3.0-py3-none-any.whl"
    told = json.dumps({"url": wheel.as_uri(), "archive_info": {}})
    assert pip_install("ray") == "pip install 'FOLDER_OR_WHEEL_OF_WHET[ray]'"  # the wheel is gone
    wheel.parent.mkdir()
    wheel.touch()
    assert pip_install("ray") == f"pip install '{wheel}[ray]'"
    for told in (None, "{", json.dumps({"url": "https://files.example.com/whet_rl.whl"})):  # noqa: B007  # `distribution` reads it
        assert not installed_by_name(pip_install("ray"))
    (tmp_path / "pyproject.toml").touch()
    assert pip_install("ray") == "pip install -e '.[ray]'"
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert pip_install("ray") == f"pip install -e '{tmp_path}[ray]'"
