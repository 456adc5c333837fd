# SPDX-License-Identifier: Apache-2.0
"""The contracts of a training engine with the loop, and of an algorithm with an engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from transformers import PreTrainedModel

from whet.batch import Batch
from whet.config.algorithm_checks import EngineUse
from whet.errors import ConfigError
from whet.metrics import Metrics

# Tensors [B, ...], and arrays of B objects (media, digests, names), which pass through every split as they are.
Columns = Mapping[str, Any]


class Spread(NamedTuple):
    """The placement of weights, gradients and optimizer state over processes."""

    shards: int = 1  # equal parts, one in a process; beyond them are copies
    on_host: bool = False  # always, and not on the accelerator that computes
    row_ranks: int = 1  # processes that compute a row together
    token_shares: int = 1  # equal parts of a row's tokens, one in a process


@runtime_checkable
class Objective(Protocol):
    """An algorithm as engines see it: it never sees logits, and the engine knows nothing of the algorithm."""

    @property
    def name(self) -> str:
        """The area of its metrics: actor, critic, sft, reward_model."""
        ...

    @property
    def needs(self) -> frozenset[str]:
        """The model outputs that it reads: log_probs, entropy, sum_pi_squared, values, scores."""
        ...

    @property
    def temperature(self) -> float:
        """The temperature of the distribution for log_probs and entropy."""
        ...

    @property
    def block(self) -> int | str:
        """Rows that stay in one micro-batch and on one rank: a number of consecutive rows (2 for preference pairs), or
        the name of a column in which these rows are equal."""
        ...

    def counts(self, batch: Columns) -> dict[str, torch.Tensor]:
        """Returns the divisors of losses. The engine sums them over the whole mini-batch, all ranks included."""
        ...

    def loss(self, outputs: Columns, batch: Columns, counts: Columns) -> tuple[torch.Tensor, Metrics]:
        """Returns a micro-batch's share of the loss: the shares of any split sum to the mini-batch's loss."""
        ...


@runtime_checkable
class Narrows(Protocol):
    """An objective that reads model outputs of only some sampled tokens."""

    def narrowed(self, batch: Batch) -> Batch:
        """Returns the batch with a `response_mask` of exactly the tokens that the loss reads."""
        ...


class TrainEngine(Protocol):
    """A model with an optimizer, or without one if it is only read."""

    @classmethod
    def spread(cls, processes: int, options: Mapping[str, Any]) -> Spread:
        """Returns the placement of a model by an engine with these options over the processes of its role."""
        ...

    @classmethod
    def refuses(cls, use: EngineUse) -> Iterable[ConfigError]:
        """Returns an error for each setting that the engine cannot run with; called without an engine, when a config is
        loaded and when its data is read."""
        ...

    @property
    def dp_rank(self) -> int:
        """The number of the batch shard that this rank reads; equal on ranks that share a row's tokens or heads."""
        ...

    @property
    def dp_size(self) -> int:
        """The number of shards of a batch."""
        ...

    @property
    def is_reporting(self) -> bool:
        """True on one of the ranks with the same `dp_rank`, whose results count."""
        ...

    def forward(self, batch: Batch, needs: frozenset[str], temperature: float = 1.0) -> dict[str, torch.Tensor]:
        """Model outputs [B, R] without gradient, in row order."""
        ...

    def forward_backward(self, batch: Batch, objective: Objective, counts: Columns | None = None) -> Metrics:
        """Adds the gradient of the loss of `batch` to the gradients of earlier calls since the last step.

        `counts` are the divisors of the whole mini-batch, of which `batch` is a part; None: `batch` is all of it, and
        the engine sums `objective.counts` over the ranks."""
        ...

    def step(self) -> Metrics:
        """Takes one optimizer step with the accumulated gradients, and resets them."""
        ...

    def whole_module(self) -> PreTrainedModel | None:
        """The language model itself, if it is whole on this rank; a rollout may then sample from it."""
        ...

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole weights under their Hugging Face names, one at a time, tied ones once; all ranks take part."""
        ...

    def has_finite_weights(self) -> bool:
        """Tells whether this rank's part of the trained weights, and its outputs for a row of the last update, are
        finite; all ranks take part."""
        ...

    def save(self, path: Path, start: dict[str, Any] | None) -> None:
        """Writes weights, optimizer and schedule, and `start`; all ranks take part."""
        ...

    def load(self, path: Path) -> dict[str, Any] | None:
        """Restores the state that `save` wrote and returns its `start`; all ranks take part."""
        ...

    def offload(self, weights: bool = True) -> None:
        """Frees device memory of gradients, optimizer state and, unless a rollout samples from them, weights."""
        ...

    def onload(self) -> None:
        """Moves back the tensors that `offload` moved off the device."""
        ...


@runtime_checkable
class TrainsAdapter(Protocol):
    """An engine that can train an adapter instead of the model."""

    def adapter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole weights of the adapter, under the names in an adapter's folder, one at a time; all ranks take part."""
        ...

    def adapter_off(self) -> AbstractContextManager[None]:
        """Switches the adapter off during the block: the model is then the base model."""
        ...

    def fingerprint(self) -> str:
        """A hash that identifies the weights below an adapter; on every rank."""
        ...
