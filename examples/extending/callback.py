# SPDX-License-Identifier: Apache-2.0
"""Callbacks, called after every step: whet train ... \\
'trainer.callbacks=[examples/extending/callback.py:stop_when_solved,examples/extending/callback.py:to_csv]'

The second is a tracker of your own: it gets the numbers that `trainer.logger` gets."""

import csv
from collections.abc import Mapping

from whet.trainers.run import Run


def stop_when_solved(run: Run, step: int, metrics: Mapping[str, float]) -> None:
    """Makes this step the last one where every response is correct; it is still saved."""
    if metrics.get("reward/accuracy") == 1:
        run.total_steps = step


def to_csv(run: Run, step: int, metrics: Mapping[str, float]) -> None:
    """Adds a line to curves.csv in the run's folder. A resumed run repeats steps, so the last line of a step counts."""
    if "critic/score/mean" not in metrics:  # the validation before the first step
        return
    with (run.run_dir / "curves.csv").open("a", newline="", encoding="utf-8") as file:
        csv.writer(file).writerow([step, metrics["critic/score/mean"], metrics["response_length/mean"]])
