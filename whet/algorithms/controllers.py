# SPDX-License-Identifier: Apache-2.0
"""Weights of the KL and of the entropy bonus from step to step, with the state that a checkpoint needs."""

from __future__ import annotations

from collections.abc import Mapping


class Fixed:
    """The same weight in every step. It has no state: a resumed run follows its config."""

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def update(self, *measured: float | None) -> None:
        """Adapts nothing."""

    def state(self) -> dict[str, float]:
        """Empty."""
        return {}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Loads nothing."""


class AdaptiveKL:
    """coef *= 1 + clip(kl / target - 1, -0.2, 0.2) n / horizon after a step of n sequences: the weight grows while the
    KL is above its target.  Ziegler et al. 2019, https://arxiv.org/abs/1909.08593."""

    def __init__(self, coef: float, target: float, horizon: int) -> None:
        self.coef, self.target, self.horizon = coef, target, horizon

    def update(self, kl: float, num_sequences: int) -> None:
        """Adapts the weight to a step's mean KL."""
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.coef *= 1.0 + error * num_sequences / self.horizon

    def state(self) -> dict[str, float]:
        """The current weight."""
        return {"coef": self.coef}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Goes on with a saved weight."""
        self.coef = state["coef"]


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
        """Takes note of a step's mean entropy; None where the step trained nothing."""
        if entropy is None:
            return
        self._is_low = entropy < self.target
        moved = self._coef + (self.delta if self._is_low else -self.delta)
        self._coef = min(max(moved, 0.0), self.highest)

    def state(self) -> dict[str, float]:
        """The weight, and whether it is at work."""
        return {"coef": self._coef, "is_low": float(self._is_low)}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Goes on from what `state` gave."""
        self._coef, self._is_low = state["coef"], bool(state["is_low"])
