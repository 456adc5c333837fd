# SPDX-License-Identifier: Apache-2.0
"""A whole run with rollouts on two processes: killed and resumed, exported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

sizes = pytest.importorskip("whet.plugins.megatron.sizes")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sizes.is_installed(), reason="no megatron-core: make megatron"),
]
SCRIPT = Path(__file__).parents[3] / "examples" / "survive_kills.py"
OPTIONS = {"tensor": 2, "distributed_optimizer": "true"}


@pytest.mark.timeout(1200)
def test_a_run_that_is_killed_has_the_same_numbers(tmp_path: Path) -> None:
    """The killed run's weights equal the checkpoint's by both ways of export."""
    from whet.cli.app import app

    options = [f"actor.engine.options.{name}={value}" for name, value in OPTIONS.items()]
    options += ["actor.engine.name=megatron", "algorithm.entropy_coef=0.1"]  # as the random model earns no reward
    command = [sys.executable, str(SCRIPT), "--kills=1", f"--folder={tmp_path}", "cluster.processes=2", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1100, check=False)
    different = done.stdout.rpartition("\nDIFFERENT: ")[2].strip().split(", ")
    # torch writes the folder and a number of the save into .metadata; a manifest has its digest.
    assert {Path(each).name for each in different} == {".metadata", "manifest.json"}, done.stdout + done.stderr
    metrics = (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line)["actor/grad_norm"] > 0 for line in metrics[1:])
    ways = [("killed", "plain"), ("killed", "core", "--to", "megatron"), ("core", "back", "--from", "megatron")]
    for source, target, *way in ways:
        made = CliRunner().invoke(app, ["export", str(tmp_path / source), str(tmp_path / target), *way])
        assert made.exit_code == 0, made.output
    plain, back = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "back"))
    assert plain.keys() == back.keys()
    assert all(torch.equal(plain[name].float(), back[name]) for name in plain)
