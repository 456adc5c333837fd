# SPDX-License-Identifier: Apache-2.0
"""How fast asynchronous and synchronous runs learn the quickstart's task."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import quickstart
from benchmarks.asynchronous import APART, CORRECTED, STALENESS, lines_of, stale, whet_train
from benchmarks.setting import Setting

TITLE = "The quickstart, sampled ahead"
NOTE = """\
All runs learn the quickstart's task from its SFT models, with the same correction. One process of one core trains,
another samples; beside it one process with two threads. The time is that of the training steps, without validation.
Medians over the seeds; a seed that does not reach the target counts as never. No other framework was
run beside them.
"""
TARGET = 0.95  # held-out accuracy
STEPS, SHOWN_STEPS = 400, 40
Curves = Mapping[str, Mapping[str, Sequence[Sequence[float]]]]  # step, seconds, accuracy, by mode and seed
log = logging.getLogger(__name__)


def run(setting: Setting) -> dict[str, dict[str, list[list[float]]]]:
    """Held-out accuracy of the quickstart's task by mode and seed: step, seconds until then, accuracy."""
    if not setting.scale.is_thorough:
        return {}
    modes = {"one process, two threads": [CORRECTED], "apart, synchronous": [APART, CORRECTED]}
    modes |= {f"apart, max_staleness={k:g}": [APART, *stale(k)] for k in STALENESS}
    found: dict[str, dict[str, list[list[float]]]] = {name: {} for name in modes}
    for seed in setting.scale.quickstart_seeds:
        folder = quickstart.prepare(setting, seed)
        task = [
            *("train", "quickstart", f"model.path={folder}/sft_model", f"data.train_files=[{folder}/train.jsonl]"),
            *(f"data.val_files=[{folder}/held_out.jsonl]", "trainer.val_freq=10", "trainer.logger=[jsonl]"),
            *("trainer.log_rollouts=0", "trainer.save_freq=0", f"trainer.total_steps={STEPS}", f"trainer.seed={seed}"),
        ]
        for name, words in modes.items():
            log.info("race: %s, seed %d", name, seed)
            threads = 2 if name.startswith("one") else 1
            found[name][str(seed)] = _curve(whet_train([*task, *words], setting.scratch, threads))
    return found


def report(results: Mapping[str, Any]) -> list[str]:
    """Two tables."""
    found = results["race"]
    return [*_reached(found), "", *_by_step(found)] if found else []


def _reached(race: Curves) -> list[str]:
    """A line for each mode: when its seeds reached the target."""
    head = f"steps to {TARGET:.0%} | by seed | seconds to {TARGET:.0%} | seconds by seed | last accuracy"
    lines = [f"| the quickstart's task | {head} |", "|---|--:|---|--:|---|--:|"]
    for name, by_seed in race.items():
        first = [
            next(((step, spent) for step, spent, accuracy in curve if accuracy >= TARGET), (math.inf, math.inf))
            for curve in by_seed.values()
        ]
        steps, seconds = (median(column) for column in zip(*first, strict=True))
        shown = [f"{steps:.0f}", f"{seconds:.1f} s"] if steps < math.inf else ["not reached", ""]
        each, times = (
            ", ".join("never" if value == math.inf else f"{value:{form}}" for value in column)
            for column, form in zip(zip(*first, strict=True), (".0f", ".1f"), strict=True)
        )
        last = median(curve[-1][2] for curve in by_seed.values())
        lines.append(f"| {name} | {shown[0]} | {each} | {shown[1]} | {times} | {last:.1%} |")
    return lines


def _by_step(race: Curves) -> list[str]:
    """Held-out accuracy and seconds by step."""
    steps = range(0, STEPS + 1, SHOWN_STEPS)
    lines = [f"| accuracy after steps | {' | '.join(map(str, steps))} |", f"|---|{'--:|' * len(steps)}"]
    for name, by_seed in race.items():
        at = [{step: (spent, accuracy) for step, spent, accuracy in curve} for curve in by_seed.values()]
        cells = [
            f"{median(each[step][1] for each in at):.1%}, {median(each[step][0] for each in at):.0f} s"
            if all(step in each for each in at)
            else ""
            for step in steps
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _curve(folder: Path) -> list[list[float]]:
    """Step, seconds of training until then, held-out accuracy."""
    seconds = {line["step"]: line.get("time/step", 0.0) for line in lines_of(folder / "timings.jsonl")}
    return [
        [line["step"], sum(value for each, value in seconds.items() if each <= line["step"]), line["val/accuracy"]]
        for line in lines_of(folder / "metrics.jsonl")
        if "val/accuracy" in line
    ]
