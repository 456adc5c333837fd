# SPDX-License-Identifier: Apache-2.0
"""Losses of models that score: value losses per token [B, R], with per-token diagnostics (reported as `critic/<name>`);
and preference losses of reward models."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from whet.algorithms.statistics import row_sums
from whet.options import Positive
from whet.registry import register_value_loss


@register_value_loss("clipped", aliases={"mse": {"cliprange_value": None}})
def clipped(
    values: Tensor, old_values: Tensor, returns: Tensor, *, cliprange_value: Positive | None = 0.5
) -> tuple[Tensor, dict[str, Tensor]]:
    """1/2 max((v - R)^2, (clamp(v, v_old - c, v_old + c) - R)^2), or 1/2 (v - R)^2 where c is None.   -> [B, R]

    v is `values` under the critic being updated, v_old `old_values` before it, R `returns`, c `cliprange_value`.
    Schulman et al. 2015, https://arxiv.org/abs/1506.02438; the clip is that of the PPO implementations
    (Engstrom et al. 2020, https://arxiv.org/abs/2005.12729).
    """
    losses = (values - returns).square()
    diagnostics = {"vpred_mean": values.detach()}
    if cliprange_value is not None:
        near = torch.clamp(values, old_values - cliprange_value, old_values + cliprange_value)
        clipped_losses = (near - returns).square()
        diagnostics["vf_clipfrac"] = clipped_losses > losses
        losses = torch.maximum(losses, clipped_losses)
    return 0.5 * losses, diagnostics


@register_value_loss("implicit_reward", aggregation="seq-mean-token-mean")
def implicit_reward(
    log_probs: Tensor, ref_log_probs: Tensor, accuracy: Tensor, response_mask: Tensor, *, beta: Positive = 0.05
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of the process reward model: cross-entropy of sigmoid(sum_t beta (l - b)) against the correctness.

    l is from the reward model, b from its reference. One number per row, repeated on its tokens.   -> [B, R]
    Yuan et al. 2024, https://arxiv.org/abs/2412.01981."""
    logit = beta * row_sums(log_probs - ref_log_probs, response_mask)
    right = (accuracy >= 1.0).to(logit.dtype)
    loss = F.binary_cross_entropy_with_logits(logit, right, reduction="none")
    agrees = (logit > 0) == (right > 0)
    return loss[:, None].expand(response_mask.shape), {"prm_accuracy": agrees[:, None].expand(response_mask.shape)}


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """1 - var(R - V) / (var(R) + 1e-5) over the N positions where `mask` is not 0, var with N - 1: 1 where values equal
    returns, 0 where they are no better than the mean return.   [B, R] x 3 -> scalar"""
    sampled = mask != 0
    left = (returns - values)[sampled].var()
    return 1.0 - left / (returns[sampled].var() + 1e-5)


def step_cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """-y log sigmoid(r) - (1 - y) log sigmoid(-r), of the score r after a step and its label y in [0, 1].   [n] -> [n]

    Lightman et al. 2023, https://arxiv.org/abs/2305.20050; soft labels: Wang et al. 2024 (Math-Shepherd),
    https://arxiv.org/abs/2312.08935.
    """
    return F.binary_cross_entropy_with_logits(scores, labels, reduction="none")


def calibration(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Computes the Brier score, mean (p - y)^2 with p = sigmoid(logit) and y the label, and the calibration error.

    The error is the mean of |accuracy - confidence| over 10 equal bins of the confidence max(p, 1 - p), weighted by the
    sizes of the bins. A label between 0 and 1 is a share of right answers.   [n] x 2 -> scalars
    Guo et al. 2017, https://arxiv.org/abs/1706.04599.
    """
    confidence, right = logits.abs().sigmoid(), torch.where(logits > 0, labels, 1 - labels)
    bins = ((confidence - 0.5) * 20).long().clamp(max=9)
    apart = torch.zeros(10, device=logits.device).index_add(0, bins, right - confidence)
    return {"brier": (logits.sigmoid() - labels).square().mean(), "calibration_error": apart.abs().sum() / len(logits)}


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor, *, center_coef: float = 0.0) -> Tensor:
    """-log sigmoid(chosen - rejected - margin) + center_coef (chosen + rejected)^2, of scores of pairs.   [n] -> [n]

    Bradley & Terry 1952, as in Ouyang et al. 2022, https://arxiv.org/abs/2203.02155; margin: Touvron et al. 2023 (Llama
    2), https://arxiv.org/abs/2307.09288; center_coef: Eisenstein et al. 2023, https://arxiv.org/abs/2312.09244.
    """
    loss = -F.logsigmoid(chosen - rejected - margin)
    return loss + center_coef * (chosen + rejected).square() if center_coef else loss
