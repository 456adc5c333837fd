# SPDX-License-Identifier: Apache-2.0
"""Steps of the quickstart's recipe beside other programs that use every processor."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.setting import Setting
from whet.plugins.lessons.quickstart import write_adder, write_problems
from whet.tracking.tracker import read_records
from whet.trainers.run import Run

TITLE = "A run beside other programs"
NOTE = """\
Steps of the quickstart's recipe, alone and beside one process for each core that only counts, in turn within one run;
the median of the blocks' medians, each without its first two steps. Half of the processors are a fair share: 2 times.
"""
BLOCK, BLOCKS = 8, 6  # steps; every second block is beside the others
SKIPPED = 2
_others: list[subprocess.Popen[bytes]] = []


def run(setting: Setting) -> dict[str, Any]:
    """Seconds of every step, alone and beside."""
    folder, blocks = setting.scratch / "beside", BLOCKS if setting.scale.is_thorough else 2
    write_problems(folder, 0)
    write_adder(folder / "model", 0)
    whet = str(Path(sys.executable).parent / "whet")
    words = [f"model.path={folder}/model", f"data.train_files={folder}/train.jsonl", f"trainer.run_dir={folder}/run"]
    words += [f"trainer.total_steps={BLOCK * blocks}", "trainer.callbacks=[benchmarks.beside:take_turns]"]
    words += ["trainer.val_freq=-1", "trainer.save_freq=0", "trainer.logger=[jsonl]", "algorithm.filter.name=null"]
    path = f"{Path(__file__).parents[1]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONPATH": path}
    subprocess.run([whet, "train", "quickstart", *words], check=True, capture_output=True, env=environment)
    seconds = [record["time/step"] for record in read_records(folder / "run" / "timings.jsonl")]
    taken = [seconds[BLOCK * block + SKIPPED : BLOCK * (block + 1)] for block in range(blocks)]
    return {"alone": taken[::2], "beside": taken[1::2]}


def take_turns(run: Run, step: int, numbers: Mapping[str, float]) -> None:
    """The callback that starts and ends the other programs."""
    if step % BLOCK == 0:
        stop()
        if step // BLOCK % 2:
            count = "while True: pass"
            _others.extend(subprocess.Popen([sys.executable, "-c", count]) for _ in range(os.cpu_count() or 1))


@atexit.register
def stop() -> None:
    """Ends the other programs."""
    while _others:
        other = _others.pop()
        other.kill()
        other.wait()


def report(results: Mapping[str, Any]) -> list[str]:
    """A line."""
    alone, beside = (median(map(median, results["beside"][name])) for name in ("alone", "beside"))
    return [
        f"A step takes {alone:.2f} s alone, {beside:.2f} s beside the others: {beside / alone:.2f} times (bound: 2.5)."
    ]
