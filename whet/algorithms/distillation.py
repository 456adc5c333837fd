# SPDX-License-Identifier: Apache-2.0
"""Distillation from a teacher's log-probs of the policy's responses: g is `teacher_log_probs`, o `old_log_probs`."""

from __future__ import annotations

from torch import Tensor

from whet.algorithms.advantages import grpo
from whet.options import NonNegative, Positive
from whet.registry import register_adv_est


@register_adv_est("on_policy_distillation")
def on_policy_distillation(old_log_probs: Tensor, teacher_log_probs: Tensor, *, coef: Positive = 1.0) -> Tensor:
    """A = -coef (o - g): with loss `reinforce` the policy gradient of each token's KL to the teacher.   -> [B, R]

    The teacher may be the policy itself with a hint in its prompt (self-distillation).
    Agarwal et al. 2023 (GKD), https://arxiv.org/abs/2306.13649.
    """
    return -coef * (old_log_probs - teacher_log_probs)


@register_adv_est("grpo_distillation")
def grpo_distillation(
    token_level_rewards: Tensor,
    old_log_probs: Tensor,
    teacher_log_probs: Tensor,
    response_mask: Tensor,
    uid: Tensor,
    *,
    coef: NonNegative = 1.0,
    std_norm: bool = True,
) -> Tensor:
    """A = A_GRPO - coef (o - g): learning from a reward and a teacher.   -> [B, R]"""
    base = grpo(token_level_rewards, response_mask, uid, std_norm=std_norm)[:, None]
    return base - coef * (old_log_probs - teacher_log_probs)
