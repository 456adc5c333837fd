# SPDX-License-Identifier: Apache-2.0
"""Shaping of rewards before the estimator, and of advantages after it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whet.algorithms import shaping as forms
from whet.algorithms.controllers import AdaptiveKL, Fixed
from whet.algorithms.kl import apply_kl_to_reward
from whet.algorithms.statistics import whiten
from whet.batch import Batch
from whet.columns import SCORED_BY
from whet.config.schema import TrainConfig
from whet.metrics import Metrics


class Shaper:
    """Scores to rewards: penalty for length, normalisation, clip, KL term. Its state is in the checkpoint."""

    def __init__(self, config: TrainConfig) -> None:
        kl = config.algorithm.kl
        self.config = config
        self._scored_by = SCORED_BY.get(config.reward_model.source or "")
        shapings: list[Any] = [config.algorithm.shaping, *config.reward.domains.values()]
        norms = {norm for each in shapings for norm in (each.norm_mean, each.norm_std)}
        self._normalises = not norms <= {"none", None}
        self.running: dict[str, forms.RunningScores] = {}  # by domain; "" without domains
        self.kl_controller: Fixed | AdaptiveKL = (
            Fixed(kl.coef) if kl.controller == "fixed" else AdaptiveKL(kl.coef, kl.target, kl.horizon)
        )

    def rewards(self, batch: Batch, metrics: Metrics) -> Batch:
        """Adds `token_level_rewards`, of `token_level_scores`; algorithm.truncated=drop masks truncated responses."""
        algorithm = self.config.algorithm
        if algorithm.truncated == "drop":
            batch = without_truncated(batch, metrics)
        rewards, mask = batch["token_level_scores"], batch["response_mask"]
        if self._scored_by is not None:
            rewards = self._with_model(rewards, batch)
        if algorithm.overlong.penalty > 0:
            rewards = rewards + self._overlong(batch, metrics)
        shaping = algorithm.shaping
        if (shaping.reward_scale, shaping.reward_bias) != (1.0, 0.0):
            rewards = forms.linear_map(rewards, mask, scale=shaping.reward_scale, bias=shaping.reward_bias)
        if shaping.truncated_factor != 1.0:
            rewards = forms.scale_truncated(rewards, batch["truncated"], shaping.truncated_factor)
        if self._normalises:
            rewards = self._normalised(rewards, batch)
        if shaping.reward_clip is not None:
            rewards = rewards.clamp(-shaping.reward_clip, shaping.reward_clip)
        if algorithm.kl.where == "reward":
            form, coef = algorithm.kl.form, self.kl_controller.coef
            rewards, distance = apply_kl_to_reward(rewards, batch.tensors(), form=form, coef=coef)
            mean = distance.sum() / mask.sum().clamp(min=1)
            metrics.mean("actor/reward_kl_penalty", mean, mask.sum())
            metrics.mean("actor/reward_kl_penalty_coeff", coef)
            self.kl_controller.update(float(mean), int(mask.any(1).sum()))
        return batch.with_columns(token_level_rewards=rewards)

    def advantages(self, batch: Batch, metrics: Metrics) -> Batch:
        """Whitens and clips `advantages`, after algorithm.truncated=zero has masked truncated responses."""
        if self.config.algorithm.truncated == "zero":
            batch = without_truncated(batch, metrics)
        shaping, advantages = self.config.algorithm.shaping, batch["advantages"]
        if shaping.whiten_advantages:
            advantages = whiten(advantages, batch["response_mask"])
        if shaping.advantage_clip is not None:
            advantages = advantages.clamp(-shaping.advantage_clip, shaping.advantage_clip)
        return batch if advantages is batch["advantages"] else batch.with_columns(advantages=advantages)

    def state(self) -> dict[str, Any]:
        """Returns what a resumed run needs."""
        running = {name: each.state() for name, each in self.running.items()}
        return {"kl_controller": self.kl_controller.state(), "running": running}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` gave."""
        self.kl_controller.load_state(state["kl_controller"])
        running = state["running"]
        for domain, saved in ({"": running} if "count" in running else running).items():
            self.running[domain] = forms.RunningScores()
            self.running[domain].load_state(saved)

    def _normalised(self, rewards: Tensor, batch: Batch) -> Tensor:
        """The rewards normalised, those of each domain apart."""
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

    def _with_model(self, scores: Tensor, batch: Batch) -> Tensor:
        """The scores of the reward functions, replaced by those of the reward model or judge, or with them.   [B, R]"""
        role = self.config.reward_model
        paid = forms.pay_on_last_token(role.weight * batch[str(self._scored_by)], batch["response_mask"])
        return paid if role.combine == "replace" else scores + paid

    def _overlong(self, batch: Batch, metrics: Metrics) -> Tensor:
        overlong, mask = self.config.algorithm.overlong, batch["response_mask"]
        penalty = forms.soft_overlong(
            batch["attention_mask"][:, batch["prompts"].shape[1] :].sum(1),
            max_response_length=self.config.data.max_response_length,
            buffer_length=overlong.buffer_length,
            penalty=overlong.penalty,
        )
        counted = mask.any(1)
        metrics.mean("reward/overlong_penalty", penalty[counted].mean(), int(counted.sum()))
        return forms.pay_on_last_token(penalty, mask)


def without_truncated(batch: Batch, metrics: Metrics) -> Batch:
    """Masks the responses that the length limit cut off: they belong to no group and are not trained on."""
    cut, mask = batch["truncated"], batch["response_mask"]
    metrics.mean("reward/truncated", cut.float().mean(), len(cut))
    return batch.with_columns(response_mask=mask.masked_fill(cut[:, None], 0))
