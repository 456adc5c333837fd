# SPDX-License-Identifier: Apache-2.0
"""The contracts between a training engine and the loop, and between an algorithm and an engine."""

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

# Tensors [B, ...], and arrays of B objects (media, digests, names), which are split by rows like the tensors.
Columns = Mapping[str, Any]


class Spread(NamedTuple):
    """The placement of weights, gradients and optimizer state over processes."""

    shards: int = 1  # equal parts of one copy, one in each process; with more processes there are several copies
    on_host: bool = False  # True: they stay in host memory, although the accelerator computes
    row_ranks: int = 1  # processes that compute a row together
    token_shares: int = 1  # equal parts of a row's tokens, one in a process


@runtime_checkable
class Objective(Protocol):
    """An algorithm as engines see it. It never sees logits, and the engine knows nothing of the algorithm."""

    @property
    def name(self) -> str:
        """The prefix of the names of its metrics: actor, critic, sft, reward_model."""

    @property
    def needs(self) -> frozenset[str]:
        """The model outputs that the loss reads: log_probs, entropy, sum_pi_squared, values, scores."""

    @property
    def temperature(self) -> float:
        """The temperature of the distribution for log_probs and entropy."""

    @property
    def block(self) -> int | str:
        """The rows that stay in one micro-batch and on one rank: a number of consecutive rows (2 for preference pairs),
        or the name of a column whose value is equal in these rows."""

    def counts(self, batch: Columns) -> dict[str, torch.Tensor]:
        """Returns the divisors of losses, by name. The engine sums them over the whole mini-batch and all ranks."""

    def loss(self, outputs: Columns, batch: Columns, counts: Columns) -> tuple[torch.Tensor, Metrics]:
        """Returns a micro-batch's share of the loss. However a mini-batch is split, the shares sum to its loss."""


@runtime_checkable
class Narrows(Protocol):
    """An objective that reads model outputs of only some sampled tokens."""

    def narrowed(self, batch: Batch) -> Batch:
        """Returns the batch with a `response_mask` that marks exactly the tokens that the loss reads."""


class TrainEngine(Protocol):
    """A model with an optimizer, or without one if the model is not trained."""

    @classmethod
    def spread(cls, processes: int, options: Mapping[str, Any]) -> Spread:
        """Returns the placement of a model that an engine with these options uses over the processes of its role."""

    @classmethod
    def refuses(cls, use: EngineUse) -> Iterable[ConfigError]:
        """Returns an error for each setting that the engine cannot run with. It is called on the class, when a config
        is loaded and when its data is read."""

    @property
    def dp_rank(self) -> int:
        """The number of the batch shard that this rank reads; equal on ranks that share a row's tokens or heads."""

    @property
    def dp_size(self) -> int:
        """The number of shards of a batch."""

    @property
    def is_reporting(self) -> bool:
        """True on exactly one of the ranks with the same `dp_rank`. Only this rank's results are used."""

    def forward(self, batch: Batch, needs: frozenset[str], temperature: float = 1.0) -> dict[str, torch.Tensor]:
        """Computes model outputs [B, R] without gradient, in row order."""

    def forward_backward(self, batch: Batch, objective: Objective, counts: Columns | None = None) -> Metrics:
        """Adds the gradient of the loss of `batch` to the gradients of earlier calls since the last step.

        `counts` are the divisors of the whole mini-batch, of which `batch` is a part. With None, `batch` is the whole
        mini-batch, and the engine sums `objective.counts` over the ranks."""

    def step(self) -> Metrics:
        """Takes one optimizer step with the accumulated gradients, and resets them."""

    def whole_module(self) -> PreTrainedModel | None:
        """Returns the language model itself if this rank has all of it (a rollout may sample from it), else None."""

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields full weights by their Hugging Face names, one at a time, tied weights once. All ranks take part."""

    def has_finite_weights(self) -> bool:
        """Tells whether this rank's part of the trained weights, and the model outputs for one row of the last update,
        are finite. All ranks take part."""

    def save(self, path: Path, start: dict[str, Any] | None) -> None:
        """Writes weights, optimizer, schedule and `start` (an adapter's base) for a resume. All ranks take part."""

    def load(self, path: Path) -> dict[str, Any] | None:
        """Restores the state that `save` wrote, and returns its `start`. All ranks take part."""

    def offload(self, weights: bool = True) -> None:
        """Frees gradients, and moves optimizer state and, with `weights`, the weights from the device to the host."""

    def onload(self) -> None:
        """Moves the tensors that `offload` moved off the device back to it."""


@runtime_checkable
class TrainsAdapter(Protocol):
    """An engine that can train an adapter instead of the model."""

    def adapter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the adapter's full weights by their names in an adapter folder, one at a time. All ranks take part."""

    def adapter_off(self) -> AbstractContextManager[None]:
        """Switches the adapter off during the block, so that the model is the base model."""

    def fingerprint(self) -> str:
        """Returns a hash that identifies the base weights of an adapter. All ranks take part."""


@runtime_checkable
class CopiesWeights(Protocol):
    """An engine that can copy the weights of another engine in its process."""

    def copy_from(self, other: CopiesWeights) -> None:
        """Copies the weights of an engine that stores them in the same way, with equal shapes. All ranks call it."""

    def stored(self) -> Mapping[str, torch.Tensor]:
        """Returns the weights of this rank as they are stored, by name."""
