# SPDX-License-Identifier: Apache-2.0
"""What the loop asks of a training engine, and what an engine asks of an algorithm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from transformers import PreTrainedModel

from whet.metrics import Metrics
from whet.protocol import DataProto

# Tensors [B, ...], and arrays of B objects (media, digests, names), which pass through every split as they are.
Columns = Mapping[str, Any]


class Spread(NamedTuple):
    """Where weights, gradients and optimizer state lie."""

    shards: int = 1  # equal parts, one in a process; beyond them are copies
    on_host: bool = False  # always, and not on the accelerator that computes


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

    @property
    def dp_rank(self) -> int:
        """Which shard of a batch this rank is given; ranks that share a row's tokens or heads have the same."""
        ...

    @property
    def dp_size(self) -> int:
        """Into how many shards a batch is split."""
        ...

    @property
    def is_reporting(self) -> bool:
        """Whether results come from this rank: one of those with the same `dp_rank`."""
        ...

    def forward(self, batch: DataProto, needs: frozenset[str], temperature: float = 1.0) -> dict[str, torch.Tensor]:
        """Model outputs [B, R] without gradient, in row order."""
        ...

    def update(self, batch: DataProto, objective: Objective) -> Metrics:
        """One optimizer step on the mini-batch `batch`."""
        ...

    def whole_module(self) -> PreTrainedModel | None:
        """The language model itself where it is whole on this rank, which a rollout may then sample from."""
        ...

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole weights under their Hugging Face names, one at a time, tied ones once; all ranks take part."""
        ...

    def has_finite_weights(self) -> bool:
        """Whether all numbers are finite that this rank has of the trained weights."""
        ...

    def save(self, path: Path, start: dict[str, Any] | None) -> None:
        """Writes everything that a resume needs (weights, optimizer, schedule), and `start`; all ranks take part."""
        ...

    def load(self, path: Path) -> dict[str, Any] | None:
        """Puts back what `save` wrote and returns its `start`; all ranks take part."""
        ...

    def offload(self, weights: bool = True) -> None:
        """Frees the device of gradients, of optimizer state and, unless a rollout samples from them, of weights."""
        ...

    def onload(self) -> None:
        """Puts back what `offload` took away."""
        ...


@runtime_checkable
class TrainsAdapter(Protocol):
    """An engine that can train an adapter in place of the model."""

    def adapter_off(self) -> AbstractContextManager[None]:
        """The model as it was before its adapter, for as long as the block lasts."""
        ...

    def fingerprint(self) -> str:
        """Tells the weights under an adapter from others; on every rank."""
        ...
