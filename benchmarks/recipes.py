# SPDX-License-Identifier: Apache-2.0
"""Every shipped recipe on the quickstart's task: does its algorithm help there?"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.competitor import take_turns
from benchmarks.quickstart import prepare
from benchmarks.record import Record
from benchmarks.setting import Setting
from whet.config.compose import SHIPPED, shipped_recipes
from whet.tracking.plot import Series, plot_learning_curve

TITLE = "The recipes"
NOTE = """\
Accuracy on the held-out problems, answered greedily, by step. All recipes start from the same SFT model and differ from
the recipe `quickstart` in their algorithm alone: learning rate and batch were chosen for GRPO. The task rewards a right
answer of two or three digits and has one turn, so that what an algorithm is for may have no room here.
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
        f"| recipe | seed | {' | '.join(f'step {step}' for step in SHOWN)} | last | says of itself |",
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
    return lines


def curve_of(record: Mapping[str, Any]) -> dict[int, float]:
    """Accuracy by step."""
    return {int(step): float(accuracy) for step, accuracy in Record(**record).rounds[0]["accuracies"]}


def comment_of(name: str) -> str:
    """The first line of a recipe."""
    return (SHIPPED / f"{name}.yaml").read_text().split("\n", 1)[0].lstrip("# ")


def draw(results: Mapping[str, Any], path: Path) -> None:
    """The curves of the first seed as a picture."""
    series = []
    for name, by_seed in results["recipes"].items():
        curve = curve_of(next(iter(by_seed.values())))
        series.append(Series(name.removesuffix("_quickstart"), list(curve), list(curve.values()), markers=True))
    plot_learning_curve(path, series, title="Adding two-digit numbers", y_label="held-out accuracy")
