# SPDX-License-Identifier: Apache-2.0
"""Reward shaping: changes rewards before the estimator, and places a row's score on its tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from whet.algorithms.statistics import Groups, row_sums


def soft_overlong(
    response_lengths: Tensor, *, max_response_length: int, buffer_length: int, penalty: float = 1.0
) -> Tensor:
    """min(-(len - (L_max - L_buf)) / L_buf * penalty, 0), to be added to the score.   [B] tokens -> [B]

    A ramp over the last L_buf = `buffer_length` tokens, from 0 down to -penalty at L_max = `max_response_length`.
    Yu et al. 2025 (DAPO), https://arxiv.org/abs/2503.14476; verl's reward manager `dapo`, overlong_buffer; TRL
    get_soft_overlong_punishment.
    """
    excess = response_lengths - (max_response_length - buffer_length)
    return (-excess / buffer_length * penalty).clamp(max=0.0)


def pay_on_last_token(scores: Tensor, response_mask: Tensor) -> Tensor:
    """Puts a row's score on its last sampled token; a row without sampled tokens gets none.   [B] -> [B, R]"""
    sampled = response_mask != 0
    after = sampled.flip(-1).cumsum(-1).flip(-1)  # sampled tokens at or after t
    return torch.where(sampled & (after == 1), scores[:, None], 0.0)


def linear_map(token_level_rewards: Tensor, response_mask: Tensor, *, scale: float, bias: float) -> Tensor:
    """Replaces each row's score s by scale (s + bias). The bias is added on the last sampled token.   -> [B, R]

    AReaL's reward_scaling and reward_bias (https://arxiv.org/abs/2505.24298)."""
    paid = pay_on_last_token(torch.full_like(token_level_rewards[:, 0], bias), response_mask)
    return scale * (token_level_rewards + paid)


def scale_truncated(token_level_rewards: Tensor, truncated: Tensor, factor: float) -> Tensor:
    """Multiplies the rewards of truncated rows by `factor`: 0 removes them, 1 keeps them.   [B, R], [B] -> [B, R]

    NeMo-RL's stop_properly_penalty_coef."""
    return torch.where(truncated[:, None], factor * token_level_rewards, token_level_rewards)


def normalise(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    uid: Tensor,
    running: RunningScores,
    *,
    mean: str = "none",
    std: str = "none",
) -> Tensor:
    """Normalises scores to mean 0, or deviation 1, over the "group", the "batch" or all steps ("running").   -> [B, R]

    The mean is subtracted from the reward of a row's last sampled token; all its rewards are divided by the deviation.
    """
    scores = row_sums(token_level_rewards, response_mask)

    def over(which: str) -> Groups | RunningScores:
        if which == "running":
            return running
        return Groups(uid if which == "group" else torch.zeros_like(uid), response_mask)

    shifted = token_level_rewards
    if mean != "none":
        shifted = shifted - pay_on_last_token(over(mean).mean(scores), response_mask)
    return shifted if std == "none" else shifted / (over(std).std(scores) + 1e-6)[:, None]


class RunningScores:
    """Running mean and sample deviation of all scores (Chan et al. 1979). Its state belongs in the checkpoint."""

    def __init__(self) -> None:
        self._count, self._mean, self._squares = 0.0, 0.0, 0.0

    def mean(self, scores: Tensor) -> Tensor:
        """The mean, repeated for each of `scores`; 0 until a score is known.   [B] -> [B]"""
        return torch.full_like(scores, self._mean)

    def std(self, scores: Tensor) -> Tensor:
        """The deviation, repeated for each of `scores`; 0 until two scores are known.   [B] -> [B]"""
        return torch.full_like(scores, (self._squares / (self._count - 1)) ** 0.5 if self._count > 1 else 0.0)

    def update(self, token_level_rewards: Tensor, response_mask: Tensor) -> None:
        """Adds a step's scores. Rows without sampled tokens have no score."""
        scores = row_sums(token_level_rewards, response_mask)[response_mask.sum(-1) > 0].double()
        if not len(scores):
            return
        mean, squares = float(scores.mean()), float((scores - scores.mean()).square().sum())
        total, apart = self._count + len(scores), mean - self._mean
        self._squares += squares + apart * apart * self._count * len(scores) / total
        self._mean += apart * len(scores) / total
        self._count = total

    def state(self) -> dict[str, float]:
        """Returns the state for a checkpoint."""
        return {"count": self._count, "mean": self._mean, "squares": self._squares}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Restores a saved state."""
        self._count, self._mean, self._squares = state["count"], state["mean"], state["squares"]
