# SPDX-License-Identifier: Apache-2.0
"""Health checks of a preference run: rules over the metrics of its steps, each with its warning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from statistics import fmean

import numpy as np

Numbers = tuple[float, ...]  # of a warning; empty: no warning
History = Sequence[Mapping[str, float]]  # records of a run's steps
RECENT = 10  # steps whose mean a rule reads, and fewest steps before it warns
LOST, RATIO = 0.1, 1.5  # largest share of the reference's log-prob that is lost; largest ratio of lengths, either way
GAP, ERRORS = 0.2, 3  # largest difference of the accuracies by length; its least distance from 0, in standard errors
MARGIN, GROWTH, GAIN = 2.0, 1.5, 0.01  # a margin above, its growth since the first half of the run, accuracy since then
FEWEST = {"val/": 4, "preference/": 4 * RECENT}  # records of margin and accuracy


def chosen(history: History) -> Numbers:
    """Returns nats and percent that the better responses lost, and nats that the worse ones lost."""
    moved, log_probs, other = _means(_recent(history, "chosen_moved", "chosen_log_probs", "rejected_moved"))
    before = log_probs - moved  # 0 without a reference
    return (-moved, 100 * moved / before, -other) if moved < LOST * before < 0 else ()


def length(history: History) -> Numbers:
    """Returns the mean lengths of the better and the worse responses."""
    means = _means(_recent(history, "chosen_length", "rejected_length"))
    return means if max(means) > RATIO * min(means) else ()


def accuracy(history: History) -> Numbers:
    """Returns the accuracies where the better response is the longer one, and elsewhere."""
    rows = _recent(history, "accuracy_longer", "accuracy_shorter", most=4 * RECENT)
    gaps = [longer - shorter for longer, shorter in rows]
    return _means(rows) if abs(fmean(gaps)) > max(GAP, ERRORS * np.std(gaps, ddof=1) / len(gaps) ** 0.5) else ()


def margin(history: History) -> Numbers:
    """Returns mean margin and accuracy of the second quarter of the run, then of the last; held out, if they are."""
    for area, fewest in FEWEST.items():
        rows = [(each[f"{area}margin"], each[f"{area}accuracy"]) for each in history if f"{area}margin" in each]
        if len(rows) >= fewest:
            quarter = len(rows) // 4
            before, after = _means(rows[quarter : 2 * quarter]), _means(rows[-quarter:])
            grown = after[0] > max(MARGIN, GROWTH * before[0]) and after[1] < before[1] + GAIN
            return (*before, *after) if grown else ()
    return ()


BALANCE = "balance the rows' lengths (`whet data`), or use mean log-probs (loss=simpo, ipo)"
RULES: Mapping[Callable[[History], Numbers], str] = {
    chosen: "the better responses have lost %.1f nats (%.0f%% of their log-prob) and the worse ones %.1f: other "
    "responses become more likely; add an SFT term (loss=rpo), lower optim.lr or raise beta",
    length: f"the better responses have %.1f tokens and the worse ones %.1f: a model may learn the length; {BALANCE}",
    accuracy: f"accuracy is %.2f if the better response is longer, else %.2f: the model learns the length; {BALANCE}",
    margin: "the margin grew from %.2f (accuracy %.3f) to %.2f (accuracy %.3f): the model gets surer, not better; take "
    "an earlier checkpoint, lower optim.lr, or bound the margin (loss=ipo)",
}


def _recent(history: History, *names: str, most: int = RECENT) -> list[Numbers]:
    """Returns these metrics of the last records that have all of them, at most `most`; zeros if under RECENT have."""
    names = tuple(f"preference/{name}" for name in names)
    found = (tuple(each[name] for name in names) for each in reversed(history) if {*names} <= each.keys())
    rows = list(islice(found, most))
    return rows if len(rows) >= RECENT else [(0.0,) * len(names)] * 2


def _means(rows: Sequence[Numbers]) -> Numbers:
    return tuple(map(fmean, zip(*rows, strict=True)))
