# SPDX-License-Identifier: Apache-2.0
"""Signs that a reward is paid for something else than right responses: a gap between the training reward and the
held-out accuracy, and the held-out responses whose reward jumped most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from whet.rounding import alike

WINDOW = 5  # steps whose mean is the training reward
GAP = 0.25  # of the range of rewards; a gap that is as large, and grew by as much, is worth a warning
LONGEST_LIST = 10
Record = Mapping[str, Any]


def reward_gap(history: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """The gap at the last validation, and how much it grew since the first; 0 where there is nothing to compare.

    The gap is the mean training reward of the last steps, as a share of the range of all rewards so far, less the
    held-out accuracy. With a reward model its score is the training reward, if the reward function pays anything, as
    its accuracy then says something. `history` has the numbers of all steps, each with its `step`.
    """
    trained = [record for record in history if "critic/score/mean" in record]
    validated = [record for record in history if "val/accuracy" in record]
    if not trained or not validated:
        return 0.0, 0.0

    def range_of(name: str) -> tuple[float, float]:
        lowest = min(record[f"{name}/min"] for record in trained)
        return lowest, max(record[f"{name}/max"] for record in trained) - lowest

    lowest, width = range_of("critic/score")
    if alike(lowest, lowest + width):
        return 0.0, 0.0
    sampled, mean = "filter/sampled_score", "critic/score/mean"
    if "reward/reward_model" in trained[-1]:
        lowest, width = range_of("critic/rewards")
        sampled = mean = "critic/rewards/mean"

    def level(records: Sequence[Mapping[str, float]]) -> float:
        scores = [record.get(sampled, record[mean]) for record in records]
        return (fmean(scores) - lowest) / max(width, 1e-9)

    first = level(trained[:WINDOW]) - validated[0]["val/accuracy"]
    last = level(trained[-WINDOW:]) - validated[-1]["val/accuracy"]
    return last, last - first


def largest_jumps(before: Sequence[Record], after: Sequence[Record]) -> list[dict[str, Any]]:
    """The responses whose reward grew most between two validations, the largest jump first, of equal ones those that
    are wrong; records are `readable`."""
    earlier = {row["uid"]: row for row in before}
    jumps = [
        {
            "uid": row["uid"],
            "jump": row["reward"] - old["reward"],
            "prompt": row["prompt"],
            "ground_truth": row["ground_truth"],
            **{f"{name}_before": old[name] for name in ("reward", "accuracy", "response")},
            **{f"{name}_after": row[name] for name in ("reward", "accuracy", "response")},
        }
        for row in after
        if (old := earlier.get(row["uid"])) is not None and None not in (row["reward"], old["reward"])
    ]
    jumps = [jump for jump in jumps if jump["jump"] > 0]
    return sorted(jumps, key=lambda jump: (-jump["jump"], jump["accuracy_after"] or 0.0))[:LONGEST_LIST]
