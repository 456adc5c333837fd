# SPDX-License-Identifier: Apache-2.0
"""vLLM on a GPU machine without a network, where it is a folder of packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.workers import device_vllm
from tests.raising import raises
from whet.errors import ConfigError
from whet.plugins.inference.servers.environment import find_environment
from whet.plugins.inference.vllm.engine import PACKAGE


def test_a_folder_of_packages_is_used_by_this_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHET_VLLM_PYTHON", str(tmp_path / "none"))
    monkeypatch.setenv("WHET_VLLM_SITE", str(tmp_path / "site"))
    with raises(ConfigError, key=str(tmp_path / "none")):
        device_vllm.interpreter(tmp_path)
    for name, text in (("vllm/__init__.py", ""), ("vllm-0.26.0.dist-info/METADATA", "Name: vllm\nVersion: 0.26.0\n")):
        (tmp_path / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / name).write_text(text)
    found = find_environment(PACKAGE, device_vllm.interpreter(tmp_path))
    assert found.other == "0.26.0" and found.folder == tmp_path / "site" / "vllm"
