# SPDX-License-Identifier: Apache-2.0
"""vLLM on a GPU machine without a network, where it is a folder of packages, and parts of `make gpu` by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.workers import device_vllm
from whet.errors import ConfigError
from whet.rollout.servers.environment import find_environment
from whet.rollout.vllm.engine import PACKAGE


def test_a_folder_of_packages_is_used_by_this_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHET_VLLM_PYTHON", str(tmp_path / "none"))
    monkeypatch.setenv("WHET_VLLM_SITE", str(tmp_path / "site"))
    with pytest.raises(ConfigError, match="none does not exist"):
        device_vllm.interpreter(tmp_path)
    for name, text in (("vllm/__init__.py", ""), ("vllm-0.26.0.dist-info/METADATA", "Name: vllm\nVersion: 0.26.0\n")):
        (tmp_path / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / name).write_text(text)
    found = find_environment(PACKAGE, device_vllm.interpreter(tmp_path))
    assert found.other == "0.26.0" and found.folder == tmp_path / "site" / "vllm"


def test_parts_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are printed, and the page stays."""
    monkeypatch.setattr(gpu, "PAGE", tmp_path / "gpu.md")
    monkeypatch.setattr(gpu.devices, "here", lambda: torch.device("cuda"))
    monkeypatch.setattr(gpu, "facts", lambda device: "- accelerator: a large one\n")
    monkeypatch.setattr(gpu, "BESIDE", {"vLLM": (60.0, ("-c", "print('a table')"))})
    assert gpu.main(["vLLM"]) == 0 and not gpu.PAGE.exists()
    assert "a table" in capsys.readouterr().out
