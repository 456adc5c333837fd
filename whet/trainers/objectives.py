# SPDX-License-Identifier: Apache-2.0
"""Objectives of training engines: loss plus aggregation, for policy, critic, fine-tuning and preferences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from whet.algorithms.aggregation import aggregate, counts, loss_mask
from whet.algorithms.calls import Bound, PolicyLoss, policy_loss, whole_trajectories
from whet.algorithms.kl import kl_columns, kl_form
from whet.algorithms.preference_losses import pairs_of
from whet.algorithms.statistics import log_ratio, masked_mean, row_sums
from whet.algorithms.value_loss import bradley_terry, step_cross_entropy
from whet.batch import Batch
from whet.column_rules import tensors_of
from whet.columns import POLICY_OUTPUTS, VALUE_OUTPUTS
from whet.config.algorithm_checks import aggregation
from whet.config.preference import PreferenceConfig
from whet.config.schema import TrainConfig
from whet.engines.protocol import Columns
from whet.errors import RegistryError
from whet.metrics import Metrics
from whet.registry import POLICY_LOSSES, PREFERENCE_LOSSES, VALUE_LOSSES, Registry


@dataclass(frozen=True)
class LossObjective:
    """A registered loss with its aggregation. The token and row counts of a mini-batch normalise it."""

    loss_name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    aggregation: str = "token-mean"
    fixed_length: int = 1  # F of seq-mean-token-sum-norm
    temperature: float = 1.0
    block: int | str = 1
    bound: Bound | None = field(default=None, repr=False, compare=False)  # the loss with the options of the run
    kind: ClassVar[Registry] = POLICY_LOSSES

    @cached_property
    def function(self) -> Bound:
        """The loss with its options."""
        return self.bound or Bound(self.kind[self.loss_name], self.options)

    def __getstate__(self) -> dict[str, Any]:
        """Drops the functions before pickling. The other process finds them again by their names."""
        return {name: each for name, each in vars(self).items() if name not in ("function", "kl")} | {"bound": None}

    def call(self, columns: Columns, supplied: Mapping[str, Any] | None = None) -> PolicyLoss:
        """Calls the loss on whole sequences: sequence ratios use all sampled tokens, but only trained tokens get a
        gradient. A loss function that aggregates its values itself gets only the trained tokens."""
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
        """Counts the trained tokens, and the rows that have any."""
        return counts(loss_mask(batch))

    def aggregate(self, values: torch.Tensor, batch: Columns, counts: Columns) -> torch.Tensor:
        """Returns this micro-batch's share of the mini-batch's aggregate."""
        return aggregate(self.aggregation, values, loss_mask(batch), **counts, fixed_length=self.fixed_length)

    def narrowed(self, batch: Batch) -> Batch:
        """Masks the rows without a trained token. If the loss takes no mask, and so treats tokens independently, this
        masks every rejected token too."""
        if "loss_mask" not in batch:
            return batch
        trained = batch["loss_mask"]
        rows = batch["response_mask"] * trained.any(1, keepdim=True)
        return batch.with_columns(response_mask=rows if "response_mask" in self.function.columns else trained)

    def total(self, loss: PolicyLoss, batch: Columns, counts: Columns) -> torch.Tensor:
        """Multiplies a loss per token by `token_weights` and aggregates it. A loss that is already aggregated is scaled
        by the size of the micro-batch.  Raises: RegistryError for an aggregated loss with weights."""
        if loss.per_token is not None:
            return self.aggregate(loss.per_token * batch.get("token_weights", 1.0), batch, counts)
        return self._share(loss, batch, counts)

    def _share(self, loss: PolicyLoss, batch: Columns, counts: Columns) -> torch.Tensor:
        assert loss.aggregated is not None
        if "token_weights" in batch:
            found, expected = "returns an aggregated loss, whose tokens cannot be weighted", "a loss per token [B, R]"
            change = "return a loss per token, or unset algorithm.correction.weight"
            raise RegistryError(f"loss {self.loss_name!r}", found, expected, change)
        if self.aggregation == "token-sum":
            return loss.aggregated
        name = "num_tokens" if self.aggregation == "token-mean" else "num_sequences"
        return loss.aggregated * self.counts(batch)[name] / counts[name].clamp(min=1)


def measure(metrics: Metrics, prefix: str, loss: PolicyLoss, batch: Columns) -> None:
    """Records per-token diagnostics as means over sampled tokens, and scalars as means over rows."""
    mask = loss_mask(batch)
    size = counts(mask)
    for name, value in loss.diagnostics.items():
        metrics.mean(prefix + name, masked_mean(value, mask), size["num_tokens"])
    for name, value in loss.metrics.items():
        metrics.mean(name if "/" in name else prefix + name, value, size["num_sequences"])


def measure_ratio(metrics: Metrics, moved: torch.Tensor, mask: torch.Tensor) -> None:
    """Records mean, minimum and maximum of the ratio exp(`moved`) over the trained tokens. `moved` is the change of
    log-prob since before the update. Nothing is copied to the host. Without tokens minimum and maximum are 1."""
    ratio = log_ratio(moved, torch.zeros_like(moved)).exp()
    metrics.mean("actor/ratio_mean", masked_mean(ratio, mask), mask.bool().sum())
    if ratio.numel():
        outside = torch.where(mask.any(), ratio.new_full((), torch.inf), 1.0)
        metrics.min("actor/ratio_min", torch.where(mask != 0, ratio, outside).amin())
        metrics.max("actor/ratio_max", torch.where(mask != 0, ratio, outside.reciprocal()).amax())


def measure_share(metrics: Metrics, name: str, share: torch.Tensor, batch: Columns, counts: Columns) -> None:
    """Records a micro-batch's share of a loss, so that the step's metric is the mean of its mini-batch losses."""
    weight = loss_mask(batch).bool().any(1).sum() / counts["num_sequences"].clamp(min=1)
    metrics.mean(name, share.detach() / weight.clamp(min=1e-12), weight)


def interpolated(log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, lag: torch.Tensor) -> torch.Tensor:
    """u + d / (d + 1) (l - u): estimates the log-probs before the update without a forward pass. u =
    `rollout_log_probs` are from the weights that sampled, l = `log_probs` from weights that are d + 1 versions newer.
    d = `lag` is the number of versions from the weights that sampled to the weights before the update.   [B, R]

    At d = 0, where the policy before the update sampled the token, the estimate is u. AReaL's log-linear proximal
    policy, Fu et al. 2025, https://arxiv.org/abs/2505.24298."""
    lag = lag.clamp(min=0).to(log_probs.dtype)
    return rollout_log_probs + lag / (lag + 1) * (log_probs - rollout_log_probs)


@dataclass(frozen=True)
class PolicyObjective(LossObjective):
    """Loss of the policy: policy loss - entropy_coef H + kl_coef KL. All three terms have the same aggregation."""

    name = "actor"
    kind = POLICY_LOSSES
    entropy_coef: float = 0.0
    kl_form: str | None = None  # unset: no KL in the loss
    kl_coef: float = 0.0
    supplied: Any = None  # the argument `config` of loss functions written for verl
    interpolates: bool = False  # old log-probs between the sampler's and the policy's
    version: int = 0  # of the policy before the update

    @classmethod
    def from_config(cls, config: TrainConfig) -> PolicyObjective:
        """Returns the objective of a config; for a preference loss this is a `GroupObjective`. The loop sets the
        weights of entropy and KL at each step.  Raises: ConfigError."""
        algorithm = config.algorithm
        bound = Bound.of(POLICY_LOSSES, algorithm.policy_loss, algorithm.loss_options, "algorithm.loss_options")
        kind = GroupObjective if bound.entry.kind == PREFERENCE_LOSSES.kind else cls
        return kind(
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

    @cached_property
    def kl(self) -> Bound:
        """The KL in the loss, if it has one."""
        assert self.kl_form is not None
        return kl_form(self.kl_form)

    @property
    def needs(self) -> frozenset[str]:
        """The model outputs that the loss reads: log-probs, entropy (always, for its metric), and others."""
        read = {*self.function.columns, *(kl_columns(self.kl_form) if self.kl_form is not None else ())}
        return frozenset({"log_probs", "entropy"}) | (POLICY_OUTPUTS & read)

    def loss(self, outputs: Columns, batch: Columns, counts: Columns) -> tuple[torch.Tensor, Metrics]:
        """Computes the loss. If the batch has no old log-probs, it uses the detached current ones."""
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
        return self._with_terms(self.total(result, batch, counts), columns, counts, metrics), metrics

    def _with_terms(self, total: Tensor, columns: Columns, counts: Columns, metrics: Metrics) -> Tensor:
        """Adds the entropy and KL terms to the loss."""
        measure_share(metrics, "actor/pg_loss", total, columns, counts)
        mask, entropy = loss_mask(columns), columns["entropy"]
        tokens = mask.bool().sum()
        metrics.mean("actor/entropy", (entropy.detach() * mask).sum() / tokens.clamp(min=1), tokens)
        if self.entropy_coef:
            total = total - self.entropy_coef * self.aggregate(entropy, columns, counts)
        if self.kl_form is not None:
            distance = self.aggregate(self.kl({**columns, "response_mask": mask}), columns, counts)
            measure_share(metrics, "actor/kl_loss", distance, columns, counts)
            total = total + self.kl_coef * distance
        return total

    def _supplied(self, columns: Columns) -> dict[str, Any]:
        """Returns the keyword arguments that loss functions with verl's signature expect."""
        tensors = tensors_of(columns)
        return {
            "config": self.supplied,
            "loss_agg_mode": self.aggregation,
            "batch": {**tensors, "response_mask": loss_mask(columns)},
            "non_tensor_batch": {name: each for name, each in columns.items() if name not in tensors},
        }


@dataclass(frozen=True)
class ValueObjective(LossObjective):
    """Loss of the critic. A value model learns returns; a process reward model learns the correctness of responses."""

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
        """The outputs that the loss function reads."""
        return (POLICY_OUTPUTS | VALUE_OUTPUTS) & set(self.function.columns)

    def loss(self, outputs: Columns, batch: Columns, counts: Columns) -> tuple[torch.Tensor, Metrics]:
        """Computes the loss; `values` of the batch are the values before the update."""
        columns = {**batch, **({"old_values": batch["values"]} if "values" in batch else {}), **outputs}
        result = self.call(columns)
        metrics = Metrics()
        measure(metrics, "critic/", result, batch)
        total = self.total(result, batch, counts)
        measure_share(metrics, "critic/vf_loss", total, batch, counts)
        return total, metrics


@dataclass(frozen=True)
class TokenObjective(LossObjective):
    """Averages a loss over the tokens of examples. The column `example_weights` [B], if present, weighs the rows."""

    name: ClassVar[str]

    def counts(self, batch: Columns) -> dict[str, torch.Tensor]:
        """Counts the tokens, each with the weight of its row."""
        return {"num_tokens": (batch["response_mask"].sum(1) * batch.get("example_weights", 1)).sum()}

    def mean(self, values: torch.Tensor, batch: Columns, counts: Columns) -> tuple[torch.Tensor, Metrics]:
        """Returns these rows' share of the weighted mean of `values` [B, R], and logs it as the loss."""
        total = (row_sums(values, batch["response_mask"]) * batch.get("example_weights", 1)).sum()
        metrics, own = Metrics(), self.counts(batch)["num_tokens"]
        shown = (values.detach() * batch["response_mask"]).sum() if "example_weights" not in batch else total.detach()
        metrics.mean(f"{self.name}/loss", shown / (own + (own == 0)), own)
        metrics.sum(f"{self.name}/tokens", batch["response_mask"].bool().sum())
        return total / counts["num_tokens"], metrics


@dataclass(frozen=True)
class ImitationObjective(TokenObjective):
    """Supervised fine-tuning: -log pi, averaged over the tokens in `response_mask`."""

    loss_name: str = "nll"
    name = "sft"
    needs = frozenset({"log_probs"})

    def loss(self, outputs: Columns, batch: Columns, counts: Columns) -> tuple[torch.Tensor, Metrics]:
        """Computes the cross-entropy of the tokens whose `response_mask` is 1."""
        return self.mean(-outputs["log_probs"], batch, counts)


@dataclass(frozen=True)
class ComparisonObjective(LossObjective):
    """Averages a registered preference loss over the batch's comparisons. Rows of a comparison stay together."""

    of: str = "pair"  # pair, label, list
    block: int = 2
    name = "preference"
    kind = PREFERENCE_LOSSES

    @classmethod
    def from_config(cls, config: PreferenceConfig) -> ComparisonObjective:
        """The objective of a config.  Raises: ConfigError."""
        options = config.entry.resolve_options(config.loss_options, "loss_options")
        block = 1 if config.of == "label" else config.rows_an_example
        return cls(config.loss, options, block=block, of=config.of)

    @property
    def needs(self) -> frozenset[str]:
        """The model outputs that the loss reads: log-probs, and others by the loss's signature."""
        return frozenset({"log_probs"}) | (POLICY_OUTPUTS & {*self.function.columns})

    def counts(self, batch: Columns) -> dict[str, Tensor]:
        """Counts the comparisons that have a token to train on."""
        return {"num_comparisons": self._blocks(batch["response_mask"]).sum()}

    def loss(self, outputs: Columns, batch: Columns, counts: Columns) -> tuple[Tensor, Metrics]:
        """Sums the losses of the comparisons in these rows, and divides by the number of comparisons in the batch."""
        losses, rewards = self.function({**batch, **outputs})
        metrics, total = Metrics(), losses.sum()
        self.measure(metrics, "preference/", losses.detach(), rewards.detach(), {**batch, **outputs})
        metrics.sum("preference/tokens", batch["attention_mask"][batch["response_mask"].any(1)].sum())
        return total / counts["num_comparisons"], metrics

    def measure(self, metrics: Metrics, area: str, losses: Tensor, rewards: Tensor, batch: Columns) -> None:
        """Records the mean loss, the accuracy of the implicit rewards, and the change in log-prob of better and worse
        responses. A negative `chosen_moved` means that the better responses get less likely."""
        mask, label = batch["response_mask"], batch["label"] != 0
        is_there, count = mask.bool().any(1), self._blocks(mask).sum()
        metrics.mean(area + "loss", losses.sum() / count.clamp(min=1), count)
        log_probs = batch["log_probs"].detach()
        found = {"reward": rewards, "length": mask.sum(1).float(), "log_probs": row_sums(log_probs, mask)}
        if "ref_log_probs" in batch:
            found["moved"] = row_sums(log_probs - batch["ref_log_probs"], mask)
        for name, rows in (("chosen", is_there & label), ("rejected", is_there & ~label)):
            if size := int(rows.sum()):
                for each, mean in zip(found, torch.stack([*found.values()])[:, rows].mean(1).unbind(), strict=True):
                    metrics.mean(f"{area}{name}_{each}", mean, size)
        if self.of == "label":
            zero = batch.get("reference_point", batch.get("mean_log_ratio", torch.zeros_like(rewards)))
            right = (rewards > zero * self.options.get("beta", 1.0)) == label
            metrics.mean(area + "accuracy", right[is_there].float().mean(), is_there.sum())
            return
        better, worse, longer = self._ends(rewards, mask)
        if len(better):
            right = (better > worse).float()
            metrics.mean(area + "accuracy", right.mean(), len(right))
            metrics.mean(area + "margin", (better - worse).mean(), len(right))
            for name, rows in (("longer", longer), ("shorter", ~longer)):
                if rows.any():
                    metrics.mean(f"{area}accuracy_{name}", right[rows].mean(), rows.sum())

    def _blocks(self, mask: Tensor) -> Tensor:
        """Marks the comparisons that have a token to train on.   [B, R] -> [B / block] bool"""
        return mask.bool().any(1).view(-1, self.block).any(1)

    def _ends(self, rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the rewards of the first and last response of each comparison, and whether the first is longer."""
        lengths, rows = mask.sum(1).view(-1, self.block), rewards.view(-1, self.block)
        last = (lengths > 0).sum(1, keepdim=True) - 1
        kept = last[:, 0] > 0
        worse, length = rows.gather(1, last.clamp(min=0))[:, 0], lengths.gather(1, last.clamp(min=0))[:, 0]
        return rows[kept, 0], worse[kept], (lengths[:, 0] > length)[kept]


@dataclass(frozen=True)
class GroupObjective(PolicyObjective):
    """Applies a preference loss for pairs to groups of sampled responses. Their advantages define the pairs
    (`pairs_of`); the loss is the mean over the pairs of the mini-batch. The rows of a group stay together."""

    block: int | str = "uid"
    kind = PREFERENCE_LOSSES

    def counts(self, batch: Columns) -> dict[str, Tensor]:
        """Counts the trained tokens, the rows that have any, and the pairs."""
        return super().counts(batch) | {"num_pairs": torch.tensor(len(self._compared(batch)["label"]) // 2)}

    def narrowed(self, batch: Batch) -> Batch:
        """Masks the rows that belong to no pair."""
        paired = (batch["advantages"] != 0).any(1, keepdim=True)
        return super().narrowed(batch.with_columns(loss_mask=loss_mask(batch.tensors()) * paired))

    def loss(self, outputs: Columns, batch: Columns, counts: Columns) -> tuple[Tensor, Metrics]:
        """Sums the losses of the pairs in these rows, and divides by the number of pairs in the mini-batch."""
        columns, metrics = {**batch, **outputs}, Metrics()
        compared = self._compared(columns)
        losses, rewards = self.function(compared)
        offline = ComparisonObjective(self.loss_name, self.options)
        offline.measure(metrics, "preference/", losses.detach(), rewards.detach(), compared)
        return self._with_terms(losses.sum() / counts["num_pairs"].clamp(min=1), columns, counts, metrics), metrics

    def _compared(self, columns: Columns) -> dict[str, Tensor]:
        """Builds the loss's columns: for each pair two adjacent rows, the better first, with whole trajectories."""
        read = {*self.function.columns, "log_probs", "ref_log_probs", "advantages", "uid", "trajectory_uid"}
        own = {name: columns[name] for name in read & columns.keys()} | {"response_mask": loss_mask(columns)}
        whole = whole_trajectories(own)
        advantages, mask = whole["advantages"], whole["response_mask"]
        order = advantages.gather(1, mask.argmax(1, keepdim=True))[:, 0] * mask.any(1)
        pairs = pairs_of(order, whole["uid"])
        label = order.new_tensor([1.0, 0.0]).repeat(len(pairs))
        return {name: column[pairs.flatten()] for name, column in whole.items()} | {"label": label}


@dataclass(frozen=True)
class PreferenceObjective:
    """Loss of reward models: Bradley-Terry, averaged over pairs. Each pair is two rows, the chosen response first."""

    center_coef: float = 0.0
    name = "reward_model"
    needs = frozenset({"scores"})
    temperature = 1.0
    block = 2

    def counts(self, batch: Columns) -> dict[str, Tensor]:
        """Counts the pairs of the batch."""
        return {"num_judged": batch["response_mask"][::2].bool().any(1).sum()}

    def loss(self, outputs: Columns, batch: Columns, counts: Columns) -> tuple[Tensor, Metrics]:
        """Sums the losses of these rows, and divides by the number of pairs (or labelled steps) in the batch."""
        metrics = Metrics()
        losses, _, _ = self.measure(metrics, "reward_model/", {**batch, **outputs})
        metrics.sum("reward_model/tokens", batch["attention_mask"].sum())
        return losses.sum() / counts["num_judged"], metrics

    def measure(self, metrics: Metrics, area: str, columns: Columns) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the losses of the pairs, the logits (chosen score minus rejected score), and the labels, all 1. Also
        records means, and how often the chosen response has the higher score.   [n] x 3"""
        chosen, rejected = columns["scores"].sum(1).view(-1, 2).unbind(1)
        losses = bradley_terry(chosen, rejected, columns["margin"][::2], center_coef=self.center_coef)
        means = {"loss": losses, "accuracy": (chosen > rejected).float(), "margin": chosen - rejected}
        measure_means(metrics, area, means | {"chosen": chosen, "rejected": rejected})
        return losses, chosen - rejected, torch.ones_like(chosen)


@dataclass(frozen=True)
class StepObjective(PreferenceObjective):
    """Averages process reward losses over reasoning steps. `response_mask` is 1 on the token after each step."""

    needs = frozenset({"values"})
    block = 1

    def counts(self, batch: Columns) -> dict[str, Tensor]:
        """Counts the labelled reasoning steps in the batch."""
        return {"num_judged": batch["response_mask"].sum()}

    def measure(self, metrics: Metrics, area: str, columns: Columns) -> tuple[Tensor, Tensor, Tensor]:
        """Returns losses, scores and labels of the reasoning steps. Records how often score and label agree."""
        ends = columns["response_mask"] != 0
        scores, labels = columns["values"][ends], columns["label"][ends]
        losses = step_cross_entropy(scores, labels)
        measure_means(metrics, area, {"loss": losses, "accuracy": ((scores > 0) == (labels > 0.5)).float()})
        return losses, scores, labels


def measure_means(metrics: Metrics, area: str, values: Mapping[str, Tensor]) -> None:
    """Records the mean of each array of values [n]; all values weigh the same."""
    for name, each in values.items():
        metrics.mean(area + name, each.detach().mean(), len(each))
