# SPDX-License-Identifier: Apache-2.0
"""PRIME: process rewards for every token from a model trained only on the correctness of responses."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from whet.algorithms.advantages import rloo
from whet.algorithms.statistics import Groups, reward_to_go, row_means, row_sums, whiten
from whet.options import NonNegative, Positive
from whet.registry import register_adv_est, register_value_loss


@register_adv_est("prime")
def prime(
    token_level_rewards: Tensor,
    process_rewards: Tensor,
    response_mask: Tensor,
    uid: Tensor,
    *,
    beta: Positive = 0.05,
    outcome_weight: NonNegative = 1.0,
    process_weight: NonNegative = 1.0,
) -> Tensor:
    """A_t = whiten(w_o (s - mean of the others' s) + w_p sum_{k >= t} (q_k - mean of the others' mean q)).   -> [B, R]

    q = beta (log pi_prm - log pi_ref) of each token, `process_rewards` times beta. The process reward model is the
    critic: critic.value_loss=implicit_reward trains it online. A group of one has no baseline: its advantage is 0.
    Cui et al. 2025, https://arxiv.org/abs/2502.01456.
    """
    groups = Groups(uid, response_mask)
    process_rewards = beta * process_rewards
    means = row_means(process_rewards, response_mask)
    others = (groups.sum(means) - means) / (groups.size - 1).clamp(min=1)
    process = reward_to_go(process_rewards - others[:, None].to(means.dtype), response_mask)
    outcome = rloo(token_level_rewards, response_mask, uid)
    advantages = outcome_weight * outcome[:, None] + process_weight * process
    return whiten(advantages.masked_fill((groups.size < 2)[:, None], 0.0), response_mask)


@register_value_loss("implicit_reward", aggregation="seq-mean-token-mean")
def implicit_reward(
    log_probs: Tensor, ref_log_probs: Tensor, accuracy: Tensor, response_mask: Tensor, *, beta: Positive = 0.05
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of the process reward model: cross-entropy of sigmoid(sum_t beta (l - b)) against the correctness.

    l is of the reward model, b of its reference. One number per row, on each of its tokens.   -> [B, R]
    Yuan et al. 2024, https://arxiv.org/abs/2412.01981.
    """
    logit = beta * row_sums(log_probs - ref_log_probs, response_mask)
    right = (accuracy >= 1.0).to(logit.dtype)
    loss = F.binary_cross_entropy_with_logits(logit, right, reduction="none")
    agrees = (logit > 0) == (right > 0)
    return loss[:, None].expand(response_mask.shape), {"prm_accuracy": agrees[:, None].expand(response_mask.shape)}
