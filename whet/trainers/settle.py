# SPDX-License-Identifier: Apache-2.0
"""Decisions that are taken on all rows of a step or a mini-batch before its update: which tokens are not trained on
(`loss_mask`), the weights of the others, and the columns of losses that look at more rows than a micro-batch has.

`response_mask` stays what it is, the tokens that were sampled: ratios of sequences and statistics of rows are of them.
Losses are summed over `loss_mask` and divided by its counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from whet.algorithms.adapters import settle
from whet.algorithms.aggregation import loss_mask
from whet.algorithms.correction import gap
from whet.config.schema import TrainConfig
from whet.metrics import Metrics
from whet.protocol import DataProto
from whet.registry import POLICY_LOSSES, REJECTIONS, WEIGHTS, Entry, Registry, call


@dataclass(frozen=True)
class Chosen:
    """A registered function and its options."""

    entry: Entry
    options: Mapping[str, Any]

    @classmethod
    def of(cls, registry: Registry, name: str, options: Mapping[str, Any], where: str) -> Chosen:
        """A function by name; `where` is the config key of its options.  Raises: ConfigError, RegistryError."""
        return cls(registry[name], registry[name].resolve_options(options, where))

    def __call__(self, batch: DataProto) -> torch.Tensor:
        """What it says of a batch."""
        result: torch.Tensor = call(self.entry, batch.tensors(), self.options)
        return result


@dataclass(frozen=True)
class Settlement:
    """The functions of a config that look at a whole step, or a whole mini-batch."""

    loss: Chosen
    weight: Chosen | None = None
    rejection: Chosen | None = None

    @classmethod
    def from_config(cls, config: TrainConfig) -> Settlement:
        """The functions that a config names, with their options.  Raises: ConfigError, RegistryError."""
        algorithm, correction = config.algorithm, config.algorithm.correction

        def chosen(registry: Registry, name: str | None, options: Mapping[str, Any], key: str) -> Chosen | None:
            return None if name is None else Chosen.of(registry, name, options, f"algorithm.correction.{key}")

        return cls(
            Chosen.of(POLICY_LOSSES, algorithm.policy_loss, algorithm.loss_options, "algorithm.loss_options"),
            chosen(WEIGHTS, correction.weight, correction.weight_options, "weight_options"),
            chosen(REJECTIONS, correction.rejection, correction.rejection_options, "rejection_options"),
        )

    def reject(self, batch: DataProto, metrics: Metrics) -> DataProto:
        """Adds `loss_mask`, the sampled tokens without those that are not to be trained on, after advantages were
        estimated from all of them; and measures how far sampler and trainer are apart."""
        if "old_log_probs" in batch:
            apart = gap(batch["old_log_probs"], batch["rollout_log_probs"], batch["response_mask"])
            for name, value in apart.items():
                (metrics.max if name.endswith("max") else metrics.mean)(f"correction/{name}", value)
        if self.rejection is None:
            return batch
        sampled = batch["response_mask"] != 0
        kept = self.rejection(batch).expand(sampled.shape) & sampled
        metrics.mean("correction/rejected", 1 - kept.sum() / sampled.sum().clamp(min=1), int(sampled.sum()))
        return batch.with_columns(loss_mask=kept.to(batch["response_mask"].dtype))

    def weigh(self, mini_batch: DataProto, metrics: Metrics) -> DataProto:
        """A mini-batch with `token_weights`, which are of all that was sampled, and with the columns that the loss has
        settled, which are of what is trained on."""
        trained = loss_mask(mini_batch.tensors())
        if self.weight is not None:
            weights, counted = self.weight(mini_batch), trained != 0
            weights = weights.expand(counted.shape).masked_fill(~counted, 0.0)
            metrics.mean("correction/weight", weights.sum() / counted.sum().clamp(min=1), int(counted.sum()))
            mini_batch = mini_batch.with_columns(token_weights=weights)
        if "before" in self.loss.entry.marks:
            columns = {**mini_batch.tensors(), "response_mask": trained}
            settled = settle(self.loss.entry, columns, self.loss.options)
            new = {name: column for name, column in settled.items() if name not in columns}
            mini_batch = mini_batch.with_columns(**new)
        return mini_batch
