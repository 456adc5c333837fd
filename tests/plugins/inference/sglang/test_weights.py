# SPDX-License-Identifier: Apache-2.0
"""The weights of an SGLang server behind syncs from every mesh of two training processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[3] / "rollout"))
import server_conformance as servers
import server_weights as weights
from server_weights import folders as folders

from whet.plugins.inference.servers.engine import ServerEngine
from whet.plugins.inference.sglang.engine import PACKAGE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def checksums(server: ServerEngine) -> dict[str, str]:
    """SGLang's own checksum of each of its weights: SHA-256 of the bytes."""
    [rank] = server.call("POST", "/weights_checker", {"action": "checksum"})["ranks"]
    found: dict[str, str] = rank["checksums"]
    return found


def differing(server: ServerEngine, folder: Path) -> list[str]:
    """The names of weights that differ from the ones that SGLang itself loads from a folder; then all weights are
    noise."""
    own = checksums(server)
    assert server.call("POST", "/update_weights_from_disk", {"model_path": str(folder)})["success"]
    theirs = checksums(server)
    assert own.keys() == theirs.keys()
    server.call("POST", "/weights_checker", {"action": "reset_tensors"})
    return [name for name in own if own[name] != theirs[name]]


@pytest.mark.parametrize("arch", weights.MESHES)
def test_the_bits_of_the_export_arrive(
    arch: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers.require(PACKAGE)
    weights.check_meshes(arch, folders[arch], tmp_path, monkeypatch, "sglang", differing)
