# SPDX-License-Identifier: Apache-2.0
"""Every shipped recipe on the quickstart's task: does its algorithm help there?"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.competitor import take_turns
from benchmarks.quickstart import prepare
from benchmarks.record import Record
from benchmarks.setting import Setting
from whet.config.compose import find_recipe, shipped_recipes
from whet.plugins.plots.figures import COLOURS

TITLE = "The recipes"
NOTE = """\
Accuracy on the held-out problems, answered greedily, by step. All recipes start from the same SFT model and differ from
the recipe `quickstart` in their algorithm alone: learning rate and batch were chosen for GRPO. The task rewards a right
answer of two or three digits and has one turn, so the strength of an algorithm may not show here.
"""
EVALUATE_EVERY = 50  # steps
SHOWN = (0, 50, 100, 200, 400)  # steps of the table; and the last


def run(setting: Setting) -> dict[str, Any]:
    """Each recipe once with each seed."""
    thorough = setting.scale.is_thorough
    names = ["quickstart", *(name for name in shipped_recipes() if name.endswith("_quickstart"))]
    found: dict[str, Any] = {}
    for seed in setting.scale.recipe_seeds:
        folder = prepare(setting, seed)
        for name in names if thorough else names[:2]:
            entry = setting.whet(
                "recipe",
                recipe=name,
                model=str(folder / "sft_model"),
                train_file=str(folder / "train.jsonl"),
                held_out_file=str(folder / "held_out.jsonl"),
                run_dir=tempfile.mkdtemp(dir=setting.scratch),
                seed=seed,
                evaluate_every=EVALUATE_EVERY,
                max_steps=None if thorough else 2,
            )
            record = take_turns({name: entry}, rounds=1, warm_up=0, scratch=setting.scratch)[name]
            found.setdefault(name, {})[str(seed)] = asdict(record)
    return found


def report(results: Mapping[str, Any]) -> list[str]:
    """A table, the best at the end first."""
    lines = [
        f"| recipe | seed | {' | '.join(f'step {step}' for step in SHOWN)} | last | description |",
        "|---|---|" + "---|" * (len(SHOWN) + 2),
    ]
    rows = [
        (name, seed, curve_of(record))
        for name, by_seed in results["recipes"].items()
        for seed, record in by_seed.items()
    ]
    for name, seed, curve in sorted(rows, key=lambda row: (row[1], -row[2][max(row[2])])):
        cells = [f"{curve[step]:.3f}" if step in curve else "" for step in SHOWN]
        lines.append(f"| {name} | {seed} | {' | '.join(cells)} | {curve[max(curve)]:.3f} | {comment_of(name)} |")
    return [*lines, "", "![Held-out accuracy by step, a panel for each recipe](recipes.png)"]


def curve_of(record: Mapping[str, Any]) -> dict[int, float]:
    """Accuracy by step."""
    return {int(step): float(accuracy) for step, accuracy in Record(**record).rounds[0]["accuracies"]}


def comment_of(name: str) -> str:
    """The first line of a recipe."""
    return find_recipe(name).read_text().split("\n", 1)[0].lstrip("# ")


def draw(results: Mapping[str, Any], path: Path) -> None:
    """A small picture for each recipe: its curve of the first seed, in front of all other recipes' curves."""
    curves = {name: curve_of(next(iter(by_seed.values()))) for name, by_seed in results["recipes"].items()}
    columns = min(6, len(curves))
    rows = math.ceil(len(curves) / columns)
    figure = Figure(figsize=(2 * columns, 1.7 * rows + 0.3), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for panel, name in zip_longest(panels, curves):
        if name is None:
            panel.set_axis_off()
            continue
        for curve in curves.values():
            panel.plot([*curve], [*curve.values()], color="#d8d8d8", linewidth=0.8)
        own = curves[name]
        panel.plot([*own], [*own.values()], color=COLOURS[0], linewidth=1.8)
        panel.set_title(name.removesuffix("_quickstart"), loc="left", fontsize=9)
        panel.grid(axis="y", color="#eeeeee", linewidth=0.8)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=7)
    figure.supxlabel("step", fontsize=8)
    figure.supylabel("held-out accuracy", fontsize=8)
    figure.savefig(path)
