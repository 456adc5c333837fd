# SPDX-License-Identifier: Apache-2.0
"""Training until a held-out accuracy is reached, by a clock that stands still while it is evaluated."""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.workers.turns import Turns


class Race:
    """One turn is one training run. `start` it, then tell it of every step."""

    def __init__(self, turns: Turns, evaluate: Callable[[], float]) -> None:
        self.turns, self.evaluate = turns, evaluate
        self.every: int = turns.settings["evaluate_every"]
        self.target: float = turns.settings["target"]
        self.max_steps: int = turns.settings["max_steps"]
        self.accuracies: list[tuple[int, float, float]] = []  # step, seconds of training until then, accuracy
        self.seconds = 0.0
        self._resumed_at = 0.0

    def start(self) -> None:
        """Waits for the turn, and starts the clock."""
        self.turns.wait()
        self._resumed_at = time.perf_counter()

    def after_step(self, step: int) -> None:
        """Evaluates now and then; at the target, or after the last step, the turn and the process end."""
        self.seconds += time.perf_counter() - self._resumed_at
        if step % self.every == 0 or step == self.max_steps:
            accuracy = self.evaluate()
            self.accuracies.append((step, self.seconds, accuracy))
            if accuracy >= self.target or step == self.max_steps:
                reached = accuracy >= self.target
                self.turns.done(seconds=self.seconds, steps=step, reached=reached, accuracies=self.accuracies)
                self.turns.wait()
        self._resumed_at = time.perf_counter()
