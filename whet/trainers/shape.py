# SPDX-License-Identifier: Apache-2.0
"""Shapes rewards before the estimator and advantages after it. Corrects losses for the difference between sampler and
trainer. Controls the weights of KL and entropy bonus."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whet.algorithms import shaping as forms
from whet.algorithms.aggregation import loss_mask
from whet.algorithms.calls import Bound, with_mini_batch_columns
from whet.algorithms.correction import gap, out_of_bounds, ratio, weight_metrics
from whet.algorithms.kl import apply_kl_to_reward, kl_form
from whet.algorithms.statistics import whiten
from whet.batch import Batch
from whet.columns import SCORED_BY
from whet.config.algorithm import AlgorithmConfig
from whet.config.schema import TrainConfig
from whet.metrics import Metrics
from whet.registry import ADV_ESTIMATORS, POLICY_LOSSES, REJECTIONS, WEIGHTS, Registry


class Shaper:
    """Turns scores into rewards: length penalty, normalisation, clip, KL term. Checkpoints keep its state."""

    def __init__(self, config: TrainConfig) -> None:
        kl = config.algorithm.kl
        self.config, self._kl = config, kl_form(kl.form)
        self._scored_by = SCORED_BY.get(config.reward_model.source or "")
        shaping, of_domains = config.algorithm.shaping, config.reward.domains.values()
        norms = {norm for each in of_domains for norm in (each.norm_mean, each.norm_std)}
        norms |= {shaping.norm_mean, shaping.norm_std}
        steps: list[tuple[bool, Callable[[Tensor, Batch, Metrics], Tensor]]] = [
            (self._scored_by is not None, self._with_model),
            (config.algorithm.overlong.penalty > 0, self._overlong),
            ((shaping.reward_scale, shaping.reward_bias) != (1.0, 0.0), self._mapped),
            (shaping.truncated_factor != 1.0, self._scaled_truncated),
            (not norms <= {"none", None}, self._normalised),
            (shaping.reward_clip is not None, self._clipped),
            (kl.where == "reward", self._less_kl),
        ]
        self._shapes = [shape for is_used, shape in steps if is_used]
        self.running: dict[str, forms.RunningScores] = {}  # by domain; "" without domains
        self.kl_controller: Fixed | AdaptiveKL = (
            Fixed(kl.coef) if kl.controller == "fixed" else AdaptiveKL(kl.coef, kl.target, kl.horizon)
        )

    def rewards(self, batch: Batch, metrics: Metrics) -> Batch:
        """Computes `token_level_rewards` from `token_level_scores`. algorithm.truncated=drop masks truncated responses
        first."""
        if self.config.algorithm.truncated == "drop":
            batch = without_truncated(batch, metrics)
        rewards = batch["token_level_scores"]
        for shape in self._shapes:
            rewards = shape(rewards, batch, metrics)
        return batch.with_columns(token_level_rewards=rewards)

    def advantages(self, batch: Batch, metrics: Metrics) -> Batch:
        """Whitens and clips `advantages`. algorithm.truncated=zero masks truncated responses first."""
        if self.config.algorithm.truncated == "zero":
            batch = without_truncated(batch, metrics)
        shaping, advantages = self.config.algorithm.shaping, batch["advantages"]
        if shaping.whiten_advantages:
            advantages = whiten(advantages, batch["response_mask"])
        if shaping.advantage_clip is not None:
            advantages = advantages.clamp(-shaping.advantage_clip, shaping.advantage_clip)
        return batch if advantages is batch["advantages"] else batch.with_columns(advantages=advantages)

    def state(self) -> dict[str, Any]:
        """Returns the state of controllers and running statistics, for the checkpoint."""
        running = {name: each.state() for name, each in self.running.items()}
        return {"kl_controller": self.kl_controller.state(), "running": running}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores the state that `state` returned."""
        self.kl_controller.load_state(state["kl_controller"])
        running = state["running"]
        for domain, saved in ({"": running} if "count" in running else running).items():
            self.running[domain] = forms.RunningScores()
            self.running[domain].load_state(saved)

    def _mapped(self, rewards: Tensor, batch: Batch, metrics: Metrics) -> Tensor:
        shaping = self.config.algorithm.shaping
        scale, bias = shaping.reward_scale, shaping.reward_bias
        return forms.linear_map(rewards, batch["response_mask"], scale=scale, bias=bias)

    def _scaled_truncated(self, rewards: Tensor, batch: Batch, metrics: Metrics) -> Tensor:
        return forms.scale_truncated(rewards, batch["truncated"], self.config.algorithm.shaping.truncated_factor)

    def _clipped(self, rewards: Tensor, batch: Batch, metrics: Metrics) -> Tensor:
        most = self.config.algorithm.shaping.reward_clip
        assert most is not None
        return rewards.clamp(-most, most)

    def _less_kl(self, rewards: Tensor, batch: Batch, metrics: Metrics) -> Tensor:
        coef, mask = self.kl_controller.coef, batch["response_mask"]
        rewards, distance = apply_kl_to_reward(rewards, batch.tensors(), form=self._kl, coef=coef)
        mean = distance.sum() / mask.sum().clamp(min=1)
        metrics.mean("actor/reward_kl_penalty", mean, mask.sum())
        metrics.mean("actor/reward_kl_penalty_coeff", coef)
        self.kl_controller.update(float(mean), int(mask.any(1).sum()))
        return rewards

    def _normalised(self, rewards: Tensor, batch: Batch, metrics: Metrics) -> Tensor:
        """Normalises the rewards, separately for each domain."""
        general, configs = self.config.algorithm.shaping, self.config.reward.domains
        domains = batch["domain"] if configs else np.full(len(batch), "")
        found = rewards
        for domain in dict.fromkeys(domains.tolist()):
            own = configs.get(domain) or general
            chosen = {"mean": own.norm_mean or general.norm_mean, "std": own.norm_std or general.norm_std}
            if set(chosen.values()) == {"none"}:
                continue
            rows = torch.from_numpy(domains == domain)
            mask = batch["response_mask"][rows]
            running = self.running.setdefault(domain, forms.RunningScores())
            if "running" in chosen.values():
                running.update(rewards[rows], mask)
            normal = forms.normalise(rewards[rows], mask, batch["uid"][rows], running, **chosen)
            found = found.index_put((rows,), normal)
        return found

    def _with_model(self, scores: Tensor, batch: Batch, metrics: Metrics) -> Tensor:
        """Replaces the reward function's scores by the reward model's or judge's, or adds up both.   [B, R]"""
        role = self.config.reward_model
        paid = forms.pay_on_last_token(role.weight * batch[str(self._scored_by)], batch["response_mask"])
        return paid if role.combine == "replace" else scores + paid

    def _overlong(self, rewards: Tensor, batch: Batch, metrics: Metrics) -> Tensor:
        overlong, mask = self.config.algorithm.overlong, batch["response_mask"]
        penalty = forms.soft_overlong(
            batch["attention_mask"][:, batch["prompts"].shape[1] :].sum(1),
            max_response_length=self.config.data.max_response_length,
            buffer_length=overlong.buffer_length,
            penalty=overlong.penalty,
        )
        counted = mask.any(1)
        metrics.mean("reward/overlong_penalty", penalty[counted].mean(), int(counted.sum()))
        return rewards + forms.pay_on_last_token(penalty, mask)


def without_truncated(batch: Batch, metrics: Metrics) -> Batch:
    """Masks responses that the length limit cut off. They then belong to no group and are not trained on."""
    cut, mask = batch["truncated"], batch["response_mask"]
    metrics.mean("reward/truncated", cut.float().mean(), len(cut))
    return batch.with_columns(response_mask=mask.masked_fill(cut[:, None], 0))


@dataclass
class Fixed:
    """A constant weight. It has no state: a resumed run uses the value in its config."""

    coef: float

    def update(self, *measured: float | None) -> None:
        """Does nothing."""

    def state(self) -> dict[str, float]:
        """Returns an empty state."""
        return {}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Does nothing."""


@dataclass
class AdaptiveKL:
    """coef *= 1 + clip(kl / target - 1, -0.2, 0.2) n / horizon after a step of n sequences: the weight grows while the
    KL is above the target.  Ziegler et al. 2019, https://arxiv.org/abs/1909.08593."""

    coef: float
    target: float
    horizon: int

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
    """c += delta after a step with H < target, else c -= delta, within [0, highest]; the weight is c, or 0 while H >=
    target. H is the mean entropy of the step.  He et al. 2025 (Skywork-OR1), https://arxiv.org/abs/2505.22312.
    """

    def __init__(self, coef: float, target: float, delta: float, highest: float) -> None:
        self.target, self.delta, self.highest = target, delta, highest
        self._coef, self._is_low = coef, False

    @property
    def coef(self) -> float:
        """The weight for the next step: 0 if the last entropy reached the target."""
        return self._coef if self._is_low else 0.0

    def update(self, entropy: float | None) -> None:
        """Adapts the weight to a step's mean entropy; None if the step trained no token."""
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


def estimator(algorithm: AlgorithmConfig) -> Bound:
    """Returns the advantage estimator that a config chooses.  Raises: ConfigError, RegistryError."""
    return Bound.of(ADV_ESTIMATORS, algorithm.adv_estimator, algorithm.adv_options, "algorithm.adv_options")


@dataclass(frozen=True)
class Correction:
    """The rejection, weight and loss that a config chooses. They are functions of a whole step or mini-batch, called
    before its update. Rejections mark the tokens to train on (`loss_mask`), weights scale their loss (`token_weights`);
    some losses have columns of their own.

    `response_mask` stays the mask of sampled tokens: ratios of sequences and statistics of rows use all of them. Losses
    are summed over `loss_mask` and divided by its counts."""

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
        """Adds `loss_mask`, the mask of trained tokens. Call it after advantages are estimated from all sampled tokens.
        Records the difference between sampler and trainer."""
        if "old_log_probs" in batch:
            apart = gap(batch["old_log_probs"], batch["rollout_log_probs"], batch["response_mask"])
            for name, value in apart.items():
                (metrics.max if name.endswith("max") else metrics.mean)(f"correction/{name}", value)
        return batch if self.rejection is None else self._rejected(self.rejection, batch, metrics)

    def _rejected(self, rejection: Bound, batch: Batch, metrics: Metrics) -> Batch:
        sampled = batch["response_mask"] != 0
        kept = rejection(batch.tensors()).expand(sampled.shape) & sampled
        metrics.mean("correction/rejected", 1 - kept.sum() / sampled.sum().clamp(min=1), int(sampled.sum()))
        return batch.with_columns(loss_mask=kept.to(batch["response_mask"].dtype))

    def _measure(self, mini_batch: Batch, weights: torch.Tensor, counted: torch.Tensor, metrics: Metrics) -> None:
        """Records the spread of the weights. If the weight has bounds, also records the share of ratios outside."""
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
        """Adds `token_weights`, computed over all sampled tokens, and the columns that the loss defines, computed over
        the trained tokens."""
        if self.weight is not None:
            mini_batch = mini_batch.with_columns(token_weights=self._weights(self.weight, mini_batch, metrics))
        if "before" in self.loss.entry.marks:
            columns = mini_batch.tensors()
            columns["response_mask"] = loss_mask(columns)
            added = with_mini_batch_columns(self.loss, columns)
            mini_batch = mini_batch.with_columns(**{name: added[name] for name in added.keys() - columns.keys()})
        return mini_batch

    def _weights(self, weight: Bound, mini_batch: Batch, metrics: Metrics) -> Tensor:
        columns = mini_batch.tensors()
        weights, counted = weight(columns), loss_mask(columns) != 0
        weights = weights.expand(counted.shape).masked_fill(~counted, 0.0)
        metrics.mean("correction/weight", weights.sum() / counted.sum().clamp(min=1), int(counted.sum()))
        self._measure(mini_batch, weights, counted, metrics)
        return weights
