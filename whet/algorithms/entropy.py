# SPDX-License-Identifier: Apache-2.0
"""The weight of the entropy bonus from step to step. Its state belongs in the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping


class FixedEntropy:
    """The same weight in every step."""

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def update(self, entropy: float | None) -> None:
        """Nothing to adapt."""

    def state(self) -> dict[str, float]:
        """Empty: a resumed run follows its config."""
        return {}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Nothing to load."""


class AdaptiveEntropy:
    """c += delta after a step with H < target, else c -= delta, within [0, highest]; at work only while H < target.

    He et al. 2025 (Skywork-OR1), https://arxiv.org/abs/2505.22312.
    """

    def __init__(self, coef: float, target: float, delta: float, highest: float) -> None:
        self.target, self.delta, self.highest = target, delta, highest
        self._coef, self._is_low = coef, False

    @property
    def coef(self) -> float:
        """The weight for the next step: 0 where the entropy was high enough."""
        return self._coef if self._is_low else 0.0

    def update(self, entropy: float | None) -> None:
        """Take note of a step's mean entropy; None where the step trained nothing."""
        if entropy is None:
            return
        self._is_low = entropy < self.target
        moved = self._coef + (self.delta if self._is_low else -self.delta)
        self._coef = min(max(moved, 0.0), self.highest)

    def state(self) -> dict[str, float]:
        """The weight, and whether it is at work."""
        return {"coef": self._coef, "is_low": float(self._is_low)}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Go on from what `state` gave."""
        self._coef, self._is_low = state["coef"], bool(state["is_low"])
