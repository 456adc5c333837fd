# SPDX-License-Identifier: Apache-2.0
"""Controllers of the weights of the KL and of the entropy bonus, with their state for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping


class Fixed:
    """A constant weight. It has no state: a resumed run uses its config."""

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def update(self, *measured: float | None) -> None:
        """Does nothing."""

    def state(self) -> dict[str, float]:
        """Returns an empty state."""
        return {}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Does nothing."""


class AdaptiveKL:
    """coef *= 1 + clip(kl / target - 1, -0.2, 0.2) n / horizon after a step of n sequences: the weight grows while the
    KL is above the target.  Ziegler et al. 2019, https://arxiv.org/abs/1909.08593."""

    def __init__(self, coef: float, target: float, horizon: int) -> None:
        self.coef, self.target, self.horizon = coef, target, horizon

    def update(self, kl: float, num_sequences: int) -> None:
        """Adapts the weight to a step's mean KL."""
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.coef *= 1.0 + error * num_sequences / self.horizon

    def state(self) -> dict[str, float]:
        """Returns the current weight."""
        return {"coef": self.coef}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Restores a saved weight."""
        self.coef = state["coef"]


class AdaptiveEntropy:
    """c += delta after a step with H < target, else c -= delta, within [0, highest]; the weight is 0 while H >= target.

    He et al. 2025 (Skywork-OR1), https://arxiv.org/abs/2505.22312.
    """

    def __init__(self, coef: float, target: float, delta: float, highest: float) -> None:
        self.target, self.delta, self.highest = target, delta, highest
        self._coef, self._is_low = coef, False

    @property
    def coef(self) -> float:
        """The weight for the next step: 0 where the last entropy reached the target."""
        return self._coef if self._is_low else 0.0

    def update(self, entropy: float | None) -> None:
        """Adapts the weight to a step's mean entropy; None where the step trained no token."""
        if entropy is None:
            return
        self._is_low = entropy < self.target
        moved = self._coef + (self.delta if self._is_low else -self.delta)
        self._coef = min(max(moved, 0.0), self.highest)

    def state(self) -> dict[str, float]:
        """Returns the weight, and whether the entropy is below the target."""
        return {"coef": self._coef, "is_low": float(self._is_low)}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Restores a saved state."""
        self._coef, self._is_low = state["coef"], bool(state["is_low"])
