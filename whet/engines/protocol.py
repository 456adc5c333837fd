# SPDX-License-Identifier: Apache-2.0
"""What the loop asks of a training engine, and what an engine asks of an algorithm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

from whet.metrics import Metrics
from whet.protocol import DataProto

Columns = Mapping[str, torch.Tensor]


class Objective(Protocol):
    """What the algorithm is to an engine; it never sees logits, and the engine never sees an algorithm."""

    @property
    def name(self) -> str:
        """What its metrics are grouped under: actor, critic, sft."""
        ...

    @property
    def needs(self) -> frozenset[str]:
        """Model outputs by name: log_probs, entropy, sum_pi_squared, values."""
        ...

    @property
    def temperature(self) -> float:
        """Of the distribution that log_probs and entropy are of."""
        ...

    @property
    def block(self) -> int:
        """Consecutive rows that stay in one micro-batch (2 for preference pairs)."""
        ...

    def counts(self, batch: Columns) -> dict[str, torch.Tensor]:
        """What losses are divided by. The engine sums it over the whole mini-batch, all ranks included."""
        ...

    def loss(self, outputs: Columns, batch: Columns, counts: Columns) -> tuple[torch.Tensor, Metrics]:
        """One micro-batch's share of the loss: the shares of any split sum to the mini-batch's loss."""
        ...


class TrainEngine(Protocol):
    """A model with an optimizer, or without one where it is only read."""

    def forward(self, batch: DataProto, needs: frozenset[str], temperature: float = 1.0) -> dict[str, torch.Tensor]:
        """Model outputs [B, R] without gradient, in row order."""
        ...

    def update(self, batch: DataProto, objective: Objective) -> Metrics:
        """One optimizer step on the mini-batch `batch`."""
        ...

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights under their Hugging Face names, one at a time, tied ones once."""
        ...

    def state(self) -> dict[str, Any]:
        """Everything that a resume needs: weights, optimizer, schedule."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Puts back what `state` gave."""
        ...

    def offload(self) -> None:
        """Frees the device of weights and optimizer state."""
        ...

    def onload(self) -> None:
        """Puts back what `offload` took away."""
        ...
