# SPDX-License-Identifier: Apache-2.0
"""The quickstart on a processor without instructions for bfloat16: its dtype, and twenty steps of each stage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
WITHOUT_BFLOAT16 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
STEPS = 20
PROGRAM = """
import logging
from dataclasses import replace
from pathlib import Path

from whet.cli.app import CONSOLE
from whet.plugins.lessons.quickstart import ADDITION, quickstart

logging.getLogger("whet").setLevel(logging.INFO)
logging.getLogger("whet").addHandler(CONSOLE)
quickstart(Path("run"), 0, lesson=replace(ADDITION, recipe="steps.yaml", warm_up="warm_up.yaml"))
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of twenty steps of RL after twenty of the warm-up, and the output."""
    folder = tmp_path_factory.mktemp("any_processor")
    for name, recipe in (("steps", "quickstart"), ("warm_up", "quickstart_sft")):
        own: dict[str, Any] = {"defaults": [recipe, "_self_"], "trainer": {"total_steps": STEPS}}
        if name == "steps":  # after so short a warm-up all responses of most groups are wrong, and would be dropped
            own["algorithm"] = {"filter": {"name": None}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(own))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=folder,
        env={**os.environ, **WITHOUT_BFLOAT16},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "run", done.stdout + done.stderr


def test_it_trains_and_samples_in_float32_and_says_so(finished: tuple[Path, str]) -> None:
    folder, printed = finished
    for run in ("sft", "rl"):
        config = yaml.safe_load((folder / run / "config.yaml").read_text())
        assert config["model"]["dtype"] == "float32"
        assert config.get("rollout", config["model"])["dtype"] == "float32"
    assert printed.count("model.dtype=auto") == 2 and "bfloat16 over float32 weights" not in printed


def test_twenty_steps_of_each_stage_are_done(finished: tuple[Path, str]) -> None:
    folder, _ = finished
    for run, metric in (("sft", "sft/loss"), ("rl", "critic/score/mean")):
        lines: list[dict[str, Any]] = [json.loads(line) for line in (folder / run / "metrics.jsonl").open()]
        found = {line["step"]: line[metric] for line in lines if metric in line}
        assert list(found) == list(range(1, STEPS + 1)), run
        assert len(set(found.values())) > 1, run
    assert json.loads((folder / "summary.json").read_text())["steps"] == STEPS
