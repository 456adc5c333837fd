# SPDX-License-Identifier: Apache-2.0
"""Objectives of engines: the policy's loss, the critic's, and imitation. Registered functions plus aggregation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch

from whet.algorithms.aggregation import aggregate, counts, loss_mask
from whet.algorithms.calls import Bound, PolicyLoss, policy_loss
from whet.algorithms.kl import kl_columns, kl_penalty
from whet.algorithms.statistics import log_ratio, masked_mean, row_sums
from whet.algorithms.value_loss import bradley_terry
from whet.batch import Batch
from whet.columns import POLICY_OUTPUTS, VALUE_OUTPUTS
from whet.config.algorithm_checks import aggregation
from whet.config.schema import TrainConfig
from whet.engines.protocol import Columns
from whet.errors import RegistryError
from whet.metrics import Metrics
from whet.registry import POLICY_LOSSES, VALUE_LOSSES, Registry


@dataclass(frozen=True)
class Objective:
    """A registered loss, its aggregation, and the counts of a mini-batch."""

    loss_name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    aggregation: str = "token-mean"
    fixed_length: int = 1  # F of seq-mean-token-sum-norm
    temperature: float = 1.0
    block: int = 1
    bound: Bound | None = field(default=None, repr=False, compare=False)  # the loss with its options, of a run
    kind: ClassVar[Registry] = POLICY_LOSSES

    @cached_property
    def function(self) -> Bound:
        """The loss with its options."""
        return self.bound or Bound(self.kind[self.loss_name], self.options)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the function out: another process finds it by its name."""
        return {name: each for name, each in vars(self).items() if name != "function"} | {"bound": None}

    def call(self, columns: Columns, supplied: Mapping[str, Any] | None = None) -> PolicyLoss:
        """The loss of whole sequences: their ratios are of all sampled tokens, and only trained tokens have a gradient.
        A function that aggregates its loss itself reads the trained tokens alone."""
        trained = loss_mask(columns)
        if trained is columns["response_mask"]:
            return policy_loss(self.function, columns, supplied)
        return self._call_on(trained, columns, supplied)

    def _call_on(self, trained: torch.Tensor, columns: Columns, supplied: Mapping[str, Any] | None) -> PolicyLoss:
        output = "log_probs" if "log_probs" in self.function.columns else "values"
        held = torch.where(trained != 0, columns[output], columns[output].detach())
        result = policy_loss(self.function, {**columns, output: held}, supplied)
        if result.aggregated is None:
            return result
        return policy_loss(self.function, {**columns, "response_mask": trained}, supplied)

    def counts(self, batch: Columns) -> dict[str, torch.Tensor]:
        """Tokens that are trained on, and rows that have any."""
        return counts(loss_mask(batch))

    def aggregate(self, values: torch.Tensor, batch: Columns, counts: Columns) -> torch.Tensor:
        """Returns this micro-batch's share of the mini-batch's number."""
        return aggregate(self.aggregation, values, loss_mask(batch), **counts, fixed_length=self.fixed_length)

    def narrowed(self, batch: Batch) -> Batch:
        """Masks rows without a trained token and, for a loss that takes no mask and so reads each token alone, every
        rejected token."""
        trained = batch["loss_mask"]
        rows = batch["response_mask"] * trained.any(1, keepdim=True)
        return batch.with_columns(response_mask=rows if "response_mask" in self.function.columns else trained)

    def total(self, loss: PolicyLoss, batch: Columns, counts: Columns) -> torch.Tensor:
        """Aggregates a loss per token times `token_weights`; one that is aggregated already counts by its micro-batch's
        size.  Raises: RegistryError for such a loss with weights."""
        if loss.per_token is not None:
            return self.aggregate(loss.per_token * batch.get("token_weights", 1.0), batch, counts)
        return self._part(loss, batch, counts)

    def _part(self, loss: PolicyLoss, batch: Columns, counts: Columns) -> torch.Tensor:
        assert loss.aggregated is not None
        if "token_weights" in batch:
            found, expected = "returns a sum, whose tokens cannot be weighed", "a loss per token [B, R]"
            change = "return that, or unset algorithm.correction.weight"
            raise RegistryError(f"loss {self.loss_name!r}", found, expected, change)
        if self.aggregation == "token-sum":
            return loss.aggregated
        name = "num_tokens" if self.aggregation == "token-mean" else "num_sequences"
        return loss.aggregated * self.counts(batch)[name] / counts[name].clamp(min=1)


def measure(metrics: Metrics, prefix: str, loss: PolicyLoss, batch: Columns) -> None:
    """Per-token diagnostics as means over sampled tokens; scalars as means over rows."""
    mask = loss_mask(batch)
    size = counts(mask)
    for name, value in loss.diagnostics.items():
        metrics.mean(prefix + name, masked_mean(value, mask), size["num_tokens"])
    for name, value in loss.metrics.items():
        metrics.mean(name if "/" in name else prefix + name, value, size["num_sequences"])


def measure_ratio(metrics: Metrics, moved: torch.Tensor, mask: torch.Tensor) -> None:
    """Mean, smallest and largest exp(moved) of the tokens that are trained on: the policy's probability over the one
    before the update. Nothing is read by the host; without tokens the last two are 1."""
    ratio = log_ratio(moved, torch.zeros_like(moved)).exp()
    metrics.mean("actor/ratio_mean", masked_mean(ratio, mask), mask.bool().sum())
    if ratio.numel():
        outside = torch.where(mask.any(), ratio.new_full((), torch.inf), 1.0)
        metrics.min("actor/ratio_min", torch.where(mask != 0, ratio, outside).amin())
        metrics.max("actor/ratio_max", torch.where(mask != 0, ratio, outside.reciprocal()).amax())


def measure_share(metrics: Metrics, name: str, share: torch.Tensor, batch: Columns, counts: Columns) -> None:
    """Records a micro-batch's share of a loss, so that the mean over a step is the mean of its mini-batches' losses."""
    weight = loss_mask(batch).bool().any(1).sum() / counts["num_sequences"].clamp(min=1)
    metrics.mean(name, share.detach() / weight.clamp(min=1e-12), weight)


def interpolated(log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, lag: torch.Tensor) -> torch.Tensor:
    """u + d / (d + 1) (l - u): an estimate of the log-probs before the update, without a pass over the model. d = `lag`
    is the number of versions from the weights that sampled a token (u) to those before the update; l is one version
    later.   [B, R]

    Of tokens that the policy before the update sampled (d = 0) it is u itself. AReaL's log-linear proximal policy,
    Fu et al. 2025, https://arxiv.org/abs/2505.24298.
    """
    lag = lag.clamp(min=0).to(log_probs.dtype)
    return rollout_log_probs + lag / (lag + 1) * (log_probs - rollout_log_probs)


@dataclass(frozen=True)
class PolicyObjective(Objective):
    """policy loss - entropy_coef H + kl_coef KL, the last two aggregated like the first."""

    name = "actor"
    kind = POLICY_LOSSES
    entropy_coef: float = 0.0
    kl_form: str | None = None  # unset: no KL in the loss
    kl_coef: float = 0.0
    supplied: Any = None  # what a foreign loss is given as `config`
    interpolates: bool = False  # old log-probs between the sampler's and the policy's
    version: int = 0  # of the policy before the update

    @classmethod
    def from_config(cls, config: TrainConfig) -> PolicyObjective:
        """The objective of a config; the weights of entropy and KL are set step by step.  Raises: ConfigError."""
        algorithm = config.algorithm
        bound = Bound.of(POLICY_LOSSES, algorithm.policy_loss, algorithm.loss_options, "algorithm.loss_options")
        return cls(
            loss_name=algorithm.policy_loss,
            options=bound.options,
            bound=bound,
            aggregation=aggregation(algorithm),
            fixed_length=algorithm.loss_fixed_length or config.data.max_response_length,
            temperature=config.rollout.temperature or 1.0,
            entropy_coef=algorithm.entropy_coef,
            kl_form=algorithm.kl.form if algorithm.kl.where == "loss" else None,
            supplied=config,
            interpolates=algorithm.correction.old_log_probs == "interpolated",
        )

    @property
    def needs(self) -> frozenset[str]:
        """Log-probs, entropy (to be shown even where it is not trained on), and what else the loss reads."""
        read = {*self.function.columns, *(kl_columns(self.kl_form) if self.kl_form is not None else ())}
        return frozenset({"log_probs", "entropy"}) | (POLICY_OUTPUTS & read)

    def loss(self, outputs: Columns, batch: Columns, counts: Columns) -> tuple[torch.Tensor, Metrics]:
        """Computes the loss. Without old log-probs the samples are the current policy's: its log-probs, detached."""
        old = outputs["log_probs"].detach()
        if self.interpolates:
            old = interpolated(old, batch["rollout_log_probs"], self.version - batch["policy_version"])
        columns = {"old_log_probs": old, **batch, **outputs}
        result = self.call(columns, self._supplied(columns) if self.function.is_supplied else None)
        metrics, mask = Metrics(), loss_mask(batch)
        tokens = mask.bool().sum()
        reported = {*result.diagnostics, *result.metrics}
        if "old_log_probs" in self.function.columns and not {"ppo_kl", "actor/ppo_kl"} & reported:
            moved = columns["old_log_probs"] - outputs["log_probs"].detach()
            metrics.mean("actor/ppo_kl", masked_mean(moved, mask), tokens)
            measure_ratio(metrics, -moved, mask)
        measure(metrics, "actor/", result, batch)
        total = self.total(result, batch, counts)
        measure_share(metrics, "actor/pg_loss", total, batch, counts)

        metrics.mean("actor/entropy", (outputs["entropy"].detach() * mask).sum() / tokens.clamp(min=1), tokens)
        if self.entropy_coef:
            total = total - self.entropy_coef * self.aggregate(outputs["entropy"], batch, counts)
        if self.kl_form is not None:
            distance = self.aggregate(kl_penalty(self.kl_form, {**columns, "response_mask": mask}), batch, counts)
            measure_share(metrics, "actor/kl_loss", distance, batch, counts)
            total = total + self.kl_coef * distance
        return total, metrics

    def _supplied(self, columns: Columns) -> dict[str, Any]:
        """Returns what functions in verl's form are given by name."""
        tensors = {name: column for name, column in columns.items() if isinstance(column, torch.Tensor)}
        return {
            "config": self.supplied,
            "loss_agg_mode": self.aggregation,
            "batch": {**tensors, "response_mask": loss_mask(columns)},
            "non_tensor_batch": {name: each for name, each in columns.items() if name not in tensors},
        }


@dataclass(frozen=True)
class ValueObjective(Objective):
    """The critic's: a value model learns the returns, a process reward model which responses were correct."""

    loss_name: str = "clipped"
    name = "critic"
    kind = VALUE_LOSSES

    @classmethod
    def from_config(cls, config: TrainConfig) -> ValueObjective:
        """The objective of a config's critic.  Raises: ConfigError."""
        name, given = config.critic.value_loss, config.critic.loss_options
        bound = Bound.of(VALUE_LOSSES, name, given, "critic.loss_options")
        return cls(loss_name=name, options=bound.options, bound=bound)

    @property
    def needs(self) -> frozenset[str]:
        return (POLICY_OUTPUTS | VALUE_OUTPUTS) & set(self.function.columns)

    def loss(self, outputs: Columns, batch: Columns, counts: Columns) -> tuple[torch.Tensor, Metrics]:
        """`values` of the batch are those before the update."""
        columns = {**batch, **({"old_values": batch["values"]} if "values" in batch else {}), **outputs}
        result = self.call(columns)
        metrics = Metrics()
        measure(metrics, "critic/", result, batch)
        total = self.total(result, batch, counts)
        measure_share(metrics, "critic/vf_loss", total, batch, counts)
        return total, metrics


@dataclass(frozen=True)
class TokenObjective(Objective):
    """A mean over the tokens of examples, each times the `example_weights` [B] of its row, where there are some."""

    name: ClassVar[str]

    def counts(self, batch: Columns) -> dict[str, torch.Tensor]:
        """The number of tokens, by weight."""
        return {"num_tokens": (batch["response_mask"].sum(1) * batch.get("example_weights", 1)).sum()}

    def mean(self, values: torch.Tensor, batch: Columns, counts: Columns) -> tuple[torch.Tensor, Metrics]:
        """Returns these rows' share of the mean of `values` [B, R], which is logged as the loss."""
        total = (row_sums(values, batch["response_mask"]) * batch.get("example_weights", 1)).sum()
        metrics, own = Metrics(), self.counts(batch)["num_tokens"]
        metrics.mean(f"{self.name}/loss", total.detach() / own, own)
        metrics.sum(f"{self.name}/tokens", batch["response_mask"].bool().sum())
        return total / counts["num_tokens"], metrics


@dataclass(frozen=True)
class ImitationObjective(TokenObjective):
    """Supervised fine-tuning: -log pi of the tokens to imitate."""

    loss_name: str = "nll"
    name = "sft"
    needs = frozenset({"log_probs"})

    def loss(self, outputs: Columns, batch: Columns, counts: Columns) -> tuple[torch.Tensor, Metrics]:
        """Cross-entropy over tokens whose `response_mask` is 1."""
        return self.mean(-outputs["log_probs"], batch, counts)


@dataclass(frozen=True)
class PreferenceObjective:
    """Reward models: the Bradley-Terry loss, a mean over pairs. Rows come in pairs, the chosen response first."""

    center_coef: float = 0.0
    name = "reward_model"
    needs = frozenset({"scores"})
    temperature = 1.0
    block = 2

    def counts(self, batch: Columns) -> dict[str, torch.Tensor]:
        """The number of pairs."""
        return {"num_pairs": batch["response_mask"][::2].bool().any(1).sum()}

    def loss(self, outputs: Columns, batch: Columns, counts: Columns) -> tuple[torch.Tensor, Metrics]:
        """Losses of the pairs of these rows, divided by the number of all."""
        scores, margin = outputs["scores"].sum(1), batch["margin"][::2]
        metrics = Metrics()
        loss = measure_pairs(metrics, "reward_model/", scores, margin, self.center_coef)
        metrics.sum("reward_model/tokens", batch["attention_mask"].sum())
        return loss.sum() / counts["num_pairs"], metrics


def measure_pairs(
    metrics: Metrics, prefix: str, scores: torch.Tensor, margin: torch.Tensor, center_coef: float
) -> torch.Tensor:
    """Losses of pairs [n], whose scores [2n] alternate; records means, and how often the chosen score is higher."""
    chosen, rejected = scores[::2], scores[1::2]
    loss = bradley_terry(chosen, rejected, margin, center_coef=center_coef)
    means = {"loss": loss, "accuracy": (chosen > rejected).float(), "margin": chosen - rejected}
    means |= {"chosen": chosen, "rejected": rejected}
    for name, values in means.items():
        metrics.mean(prefix + name, values.detach().mean(), len(values))
    return loss
