# SPDX-License-Identifier: Apache-2.0
"""A server on several nodes: the command of each node's part, and weights that all nodes read. In
tests/plugins/inference/vllm/test_nodes.py two parts meet on one machine; on several machines nothing of it was run."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file

from whet.plugins.inference.servers.weights import KeptWeights, WeightsFile
from whet.plugins.inference.sglang import engine as sglang
from whet.plugins.inference.vllm import engine as vllm
from whet.rollout.protocol import Span

FRONT, PART = (Span(2, number, "10.0.0.2", 28_504) for number in range(2))


def values_of(line: list[str]) -> dict[str, str]:
    """The flags of a command line with their values."""
    return {flag: value for flag, value in pairwise(line) if flag.startswith("--")}


def test_the_parts_of_vllm() -> None:
    lines = [vllm.command("py", 80, {"model": "m", **vllm.VLLMEngine.spanning(span)}) for span in (FRONT, PART)]
    for number, line in enumerate(lines):
        expected = {"--nnodes": "2", "--node-rank": str(number), "--master-addr": "10.0.0.2", "--master-port": "28504"}
        assert expected.items() <= values_of(line).items()
        assert values_of(line)["--distributed-executor-backend"] == "mp"
    assert lines[0][:3] == ["py", "-m", vllm.ENTRY] and "--headless" not in lines[0]
    assert lines[1][:3] == ["py", "-c", vllm.HEADLESS] and lines[1][-1] == "--headless"


def test_the_parts_of_sglang() -> None:
    for number, span in enumerate((FRONT, PART)):
        line = sglang.command("py", 80, {"tp_size": 16, **sglang.SGLangEngine.spanning(span)})
        expected = {"--nnodes": "2", "--node-rank": str(number), "--dist-init-addr": "10.0.0.2:28504"}
        assert expected.items() <= values_of(line).items() and line[:3] == ["py", "-m", "whet_sglang"]


def test_weights_for_other_machines_have_a_name_until_newer_ones_come(tmp_path: Path) -> None:
    kept = KeptWeights(str(tmp_path), is_shared=True)
    paths = []
    for version in range(2):
        for _ in kept.writing([("w", torch.full((3,), float(version)))], version):
            pass
        [path] = tmp_path.iterdir()
        paths.append(path)
        assert kept.part == {"path": str(path)} and load_file(path)["w"].tolist() == [version] * 3
    assert paths[0] != paths[1]
    kept.drop()
    assert not list(tmp_path.iterdir())
    unnamed = WeightsFile(str(tmp_path))
    assert not list(tmp_path.iterdir())
    unnamed.close()
