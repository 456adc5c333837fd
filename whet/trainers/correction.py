# SPDX-License-Identifier: Apache-2.0
"""Functions of a whole step or mini-batch, called before its update: rejections say which tokens are not trained on
(`loss_mask`), weights what the others count for (`token_weights`); some losses have columns of their own.

`response_mask` stays the mask of the tokens that were sampled: ratios of sequences and statistics of rows are of them.
Losses are summed over `loss_mask` and divided by its counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from whet.algorithms.aggregation import loss_mask
from whet.algorithms.calls import Bound, with_mini_batch_columns
from whet.algorithms.correction import gap, out_of_bounds, ratio, weight_metrics
from whet.batch import Batch
from whet.config.algorithm import AlgorithmConfig
from whet.config.schema import TrainConfig
from whet.metrics import Metrics
from whet.registry import ADV_ESTIMATORS, POLICY_LOSSES, REJECTIONS, WEIGHTS, Registry


def estimator(algorithm: AlgorithmConfig) -> Bound:
    """The advantage estimator of a config.  Raises: ConfigError, RegistryError."""
    return Bound.of(ADV_ESTIMATORS, algorithm.adv_estimator, algorithm.adv_options, "algorithm.adv_options")


@dataclass(frozen=True)
class Correction:
    """The rejection, the weight and the loss that a config chooses."""

    loss: Bound
    weight: Bound | None = None
    rejection: Bound | None = None

    @classmethod
    def from_config(cls, config: TrainConfig) -> Correction:
        """The functions that a config names, with their options.  Raises: ConfigError, RegistryError."""
        algorithm, names = config.algorithm, config.algorithm.correction

        def chosen(registry: Registry, key: str) -> Bound | None:
            name, options = names[key], names[f"{key}_options"]
            return None if name is None else Bound.of(registry, name, options, f"algorithm.correction.{key}_options")

        loss = Bound.of(POLICY_LOSSES, algorithm.policy_loss, algorithm.loss_options, "algorithm.loss_options")
        return cls(loss, chosen(WEIGHTS, "weight"), chosen(REJECTIONS, "rejection"))

    def reject(self, batch: Batch, metrics: Metrics) -> Batch:
        """Adds `loss_mask`, the sampled tokens that are trained on, after advantages were estimated from all of them;
        and measures how far sampler and trainer are apart."""
        if "old_log_probs" in batch:
            apart = gap(batch["old_log_probs"], batch["rollout_log_probs"], batch["response_mask"])
            for name, value in apart.items():
                (metrics.max if name.endswith("max") else metrics.mean)(f"correction/{name}", value)
        if self.rejection is None:
            return batch
        sampled = batch["response_mask"] != 0
        kept = self.rejection(batch.tensors()).expand(sampled.shape) & sampled
        metrics.mean("correction/rejected", 1 - kept.sum() / sampled.sum().clamp(min=1), int(sampled.sum()))
        return batch.with_columns(loss_mask=kept.to(batch["response_mask"].dtype))

    def _measure(self, mini_batch: Batch, weights: torch.Tensor, counted: torch.Tensor, metrics: Metrics) -> None:
        """Records the spread of the weights, and how many ratios are outside the bounds of a weight that has them."""
        assert self.weight is not None
        spread, options = weight_metrics(weights, counted), self.weight.options
        for name, value in spread.items():
            {"min": metrics.min, "max": metrics.max}.get(name, metrics.mean)(f"correction/weight_{name}", value)
        bounds = [options[name] for name in ("floor", "low", "cap", "high") if name in options]
        if len(bounds) == 2 and "level" in options and len(weights):
            old, rollout, mask = (mini_batch[name] for name in ("old_log_probs", "rollout_log_probs", "response_mask"))
            share = out_of_bounds(ratio(old, rollout, mask, options["level"]), counted, bounds[0], bounds[1])
            metrics.mean("correction/out_of_bounds", share, int(counted.sum()))

    def weigh(self, mini_batch: Batch, metrics: Metrics) -> Batch:
        """Adds `token_weights`, which are of all tokens that were sampled, and the loss's own columns, which are of
        those that are trained on."""
        trained = loss_mask(mini_batch.tensors())
        if self.weight is not None:
            weights, counted = self.weight(mini_batch.tensors()), trained != 0
            weights = weights.expand(counted.shape).masked_fill(~counted, 0.0)
            metrics.mean("correction/weight", weights.sum() / counted.sum().clamp(min=1), int(counted.sum()))
            self._measure(mini_batch, weights, counted, metrics)
            mini_batch = mini_batch.with_columns(token_weights=weights)
        if "before" in self.loss.entry.marks:
            columns = {**mini_batch.tensors(), "response_mask": trained}
            added = with_mini_batch_columns(self.loss, columns)
            new = {name: column for name, column in added.items() if name not in columns}
            mini_batch = mini_batch.with_columns(**new)
        return mini_batch
