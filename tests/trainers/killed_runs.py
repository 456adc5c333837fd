# SPDX-License-Identifier: Apache-2.0
"""Runs of a command on examples that are killed with SIGKILL, and compared byte for byte with one that never was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

KILL = "WHET_TEST_KILL"  # environment variable: step and seconds after it
KILLS = ("2 0", "4 0.02", "6 0.1")  # the first one while its checkpoint is written, the others in a later step
STEPS = 14
DEADLINE_SECONDS = 900
CALLBACK = f"""
import os, signal, threading

def die(run):
    step, delay = os.environ.get("{KILL}", "-1 0").split()
    if run.step == int(step):
        threading.Timer(float(delay), os.kill, (os.getpid(), signal.SIGKILL)).start()
"""


def check_survives_kills(folder: Path, words: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Runs `whet` with these words twice, the second time with kills. Compares metrics and whole checkpoints."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "killer.py").write_text(CALLBACK)
    words = [*words, f"data.train_files={folder / 'rows.jsonl'}", f"data.val_files={folder / 'rows.jsonl'}"]
    words += [f"trainer.callbacks=[{folder / 'killer.py'}:die]", f"trainer.total_steps={STEPS}", "trainer.save_freq=1"]
    words += ["trainer.val_freq=3", "trainer.logger=jsonl", "trainer.save_limit=null", "optim.lr=1e-3"]
    words += [
        "data.apply_chat_template=false",
        "data.train_batch_size=5",
        "data.max_length=32",
        "optim.schedule=linear",
    ]
    assert status(words, folder / "straight") == 0
    for number, when in enumerate(KILLS):
        assert status(words, folder / "killed", when) == -signal.SIGKILL
        finished = (folder / "killed" / "metrics.jsonl").read_bytes().count(b"\n")
        assert 2 * number < finished < STEPS  # in the middle
    assert status(words, folder / "killed") == 0
    one, other = contents(folder / "straight"), contents(folder / "killed")
    assert one.keys() == other.keys() and len(one) > STEPS
    assert [name for name in one if one[name] != other[name]] == []


def status(words: Sequence[str], run_dir: Path, kill: str = "-1 0") -> int:
    """Runs the command to its end.  Returns its exit status."""
    command = [sys.executable, "-m", "whet", *words, f"trainer.run_dir={run_dir}"]
    with run_dir.with_suffix(".log").open("ab") as log:
        environment = {**os.environ, KILL: kill}
        done = subprocess.run(command, stdout=log, stderr=log, env=environment, timeout=DEADLINE_SECONDS, check=False)
    return done.returncode


def contents(run_dir: Path) -> dict[str, bytes]:
    """The bytes of metrics and checkpoints, by path in the run's folder."""
    files = (path for path in run_dir.glob("checkpoints/global_step_*/**/*") if path.is_file())
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in (run_dir / "metrics.jsonl", *files)}
