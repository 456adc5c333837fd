# SPDX-License-Identifier: Apache-2.0
"""The records of a competitor, and numbers computed from them: medians over rounds, and ratios within a round."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Record:
    """One competitor's numbers, turn by turn."""

    ready: dict[str, Any]
    warm_up: list[dict[str, Any]]
    rounds: list[dict[str, Any]]

    @property
    def seconds(self) -> float:
        """The median turn."""
        return median(self.numbers("seconds"))

    @property
    def start_seconds(self) -> float:
        """The seconds of the first turn beyond the median one: compiling, caches, first allocations."""
        return max(0.0, float(self.warm_up[0]["seconds"]) - self.seconds)

    @property
    def peak_bytes(self) -> int:
        """The most memory that the process ever held."""
        return int(max(self.numbers("peak_bytes")))

    def numbers(self, name: str) -> list[float]:
        """A number of every round."""
        return [float(turn[name]) for turn in self.rounds]

    def phases(self) -> dict[str, float]:
        """The median seconds of each phase of a step, and of the rest."""
        names = dict.fromkeys(name for turn in self.rounds for name in turn["phases"])
        medians = {name: median(turn["phases"].get(name, 0.0) for turn in self.rounds) for name in names}
        rest = median(turn["seconds"] - sum(turn["phases"].values()) for turn in self.rounds)
        return {**medians, "rest": rest}


@dataclass(frozen=True)
class Ratio:
    """How many times faster, round by round."""

    by_round: list[float]

    def __str__(self) -> str:
        """The median and, where there are several rounds, the range."""
        shown = f"{median(self.by_round):.2f}x"
        if len(self.by_round) == 1:
            return shown
        return f"{shown} ({min(self.by_round):.2f} to {max(self.by_round):.2f})"


def speed_up(baseline: Record, record: Record) -> Ratio:
    """How many times faster `record` is than `baseline`, whose turns came just before."""
    pairs = zip(baseline.numbers("seconds"), record.numbers("seconds"), strict=True)
    return Ratio([slow / fast for slow, fast in pairs])
