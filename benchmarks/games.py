# SPDX-License-Identifier: Apache-2.0
"""Games, tools and pictures that small models learn from: the recipes of examples/games.py and pictures.py, and
`whet quickstart --images`."""

from __future__ import annotations

import json
import logging
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.setting import Setting
from whet.plugins.plots.figures import Series, plot_learning_curve

TITLE = "Games"
NOTE = """\
`python examples/games.py NAME --seed SEED`: a model of 0.4 M parameters, warmed up on scripted play from random
weights, plays 256 held-out games greedily. The number is the share of games won, in `number_game` the share of right
cards, in Nim the share of right moves in positions that can be won, in `tree_game` the share of what perfect play gets,
in `webshop_grpo` the reward, whose 95 % interval over the 256 goals is at most 0.061 to either side. CPU seconds are
those of the whole command, in one thread, one run a core.
"""
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
NAMES = (
    *("calculator_quickstart", "number_game", "tree_game", "frozen_lake", "nim_self_play", "nim_one_side"),
    *("sokoban_grpo", "sokoban_ppo", "webshop_grpo"),
)
SCRIPTS = {"two_images": "pictures.py", "video_flashes": "pictures.py"}  # of examples/; all others: games.py
log = logging.getLogger(__name__)


def run(setting: Setting, names: Sequence[str] = NAMES) -> dict[str, Any]:
    """The curve and the CPU seconds by recipe and seed."""
    return run_changed(setting, {name: (name, ()) for name in names})


def run_changed(setting: Setting, recipes: Mapping[str, tuple[str, Sequence[str]]]) -> dict[str, Any]:
    """The curve and the CPU seconds by label and seed, for recipes with changes `key=value`."""
    if not setting.scale.is_thorough:
        return {}
    runs = [(label, str(seed)) for label in recipes for seed in setting.scale.quickstart_seeds]

    def play(run: tuple[str, str]) -> dict[str, Any]:
        label, seed = run
        log.info("%s, seed %s", label, seed)
        folder = setting.scratch / re.sub(r"\W+", "_", f"{label}_{seed}")  # a name without commas, for `model.path=`
        name, changes = recipes[label]
        seconds = cpu_seconds(command(name, seed, folder, *changes), folder.with_suffix(".log"))
        return {"curve": read(folder), "cpu_seconds": seconds}

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # a thread each
        found: dict[str, dict[str, Any]] = {}
        for (label, seed), played in zip(runs, pool.map(play, runs), strict=True):
            found.setdefault(label, {})[seed] = played
    return found


def command(name: str, seed: str, folder: Path, *changes: str) -> list[str]:
    """The command line that learns a recipe, writing into a folder."""
    told = ["--seed", seed, "--run-dir", str(folder), *changes]
    if name == "vlm_quickstart":
        return [str(Path(sys.executable).with_name("whet")), "quickstart", "--images", *told]
    return [sys.executable, str(EXAMPLES / SCRIPTS.get(name, "games.py")), name, *told]


def cpu_seconds(command: Sequence[str], output: Path) -> int:
    """Runs a command in one thread.  Returns its CPU seconds, with those of its processes.

    Raises: CalledProcessError with the end of its output."""
    with output.open("w+") as file:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            file.seek(0)
            raise subprocess.CalledProcessError(process.returncode, command, file.read()[-2000:])
    return round(used.ru_utime + used.ru_stime)


def read(folder: Path) -> list[list[float]]:
    """The share of right answers to held-out rows by step, from the summary of a run."""
    summary = json.loads((folder / "summary.json").read_text())
    both = [[0, summary["sft_accuracy"]], [summary["steps"], summary["rl_accuracy"]]] if "steps" in summary else None
    return both or summary["curve"]


def report(results: Mapping[str, Any]) -> list[str]:
    """A table and a picture."""
    found = results["games"]
    return [*table(found), "", "![Held-out games by step](games.png)"] if found else []


def table(found: Mapping[str, Any], what: str = "recipe") -> list[str]:
    """A line for each recipe: medians over its seeds, and the last number of each."""
    lines = [f"| {what} | seeds | after the warm-up | after RL, median | by seed | steps | CPU seconds, median |"]
    lines.append("|---|---|--:|--:|---|--:|--:|")
    for name, by_seed in found.items():
        firsts, lasts = ([run["curve"][place][1] for run in by_seed.values()] for place in (0, -1))
        steps = max(run["curve"][-1][0] for run in by_seed.values())
        seconds = statistics.median(run["cpu_seconds"] for run in by_seed.values())
        lines.append(
            f"| `{name}` | {', '.join(by_seed)} | {statistics.median(firsts):.3f} | {statistics.median(lasts):.3f} "
            f"| {', '.join(f'{last:.3f}' for last in lasts)} | {steps} | {seconds:.0f} |"
        )
    return lines


def draw(results: Mapping[str, Any], path: Path) -> None:
    """The curves: of each recipe, the median over seeds."""
    series = []
    for name, by_seed in results["games"].items():
        steps = [step for step, _ in next(iter(by_seed.values()))["curve"]]
        points = zip(*([value for _, value in run["curve"]] for run in by_seed.values()), strict=True)
        series.append(Series(name, steps, [statistics.median(each) for each in points], markers=True))
    plot_learning_curve(path, series, title="Games", y_label="held-out games won, right cards, or reward")
