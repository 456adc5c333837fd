# SPDX-License-Identifier: Apache-2.0
"""The weights of a vLLM server behind syncs from every mesh of two training processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[3] / "rollout"))
import server_weights as weights
from server_weights import folders as folders

from whet.plugins.inference.servers.engine import ServerEngine
from whet.plugins.inference.vllm import engine as vllm_engine, plain

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
INSIDE = Path(__file__).parent / "inside"


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Servers whose workers compare their weights."""
    extended = {"worker_extension_cls": "told_weights.Told"}
    monkeypatch.setattr(vllm_engine, "INSIDE", f"{vllm_engine.INSIDE}{os.pathsep}{INSIDE}")
    monkeypatch.setattr(vllm_engine, "inside", lambda *given: plain.inside(*given) | extended)
    yield


def differing(server: ServerEngine, folder: Path) -> list[str]:
    """The names of weights that differ from a folder's."""
    [found] = server.call("POST", "/collective_rpc", {"method": "differing", "args": [str(folder)]})["results"]
    names: list[str] = found
    return names


@pytest.mark.parametrize("arch", weights.MESHES)
def test_the_bits_of_the_export_arrive(
    has_vllm: None, told: None, arch: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights.check_meshes(arch, folders[arch], tmp_path, monkeypatch, "vllm", differing)
