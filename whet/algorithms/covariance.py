# SPDX-License-Identifier: Apache-2.0
"""Policy losses that preserve entropy: a few tokens with a high covariance of log-prob and advantage reduce it most.

cov = (A - mean A)(o - mean o) over the sampled tokens of the mini-batch. The choice of tokens depends on all of them,
so it is made before the update, with the old policy: a loss sees only the rows of its micro-batch.
Cui et al. 2025, https://arxiv.org/abs/2505.22617.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whet.algorithms.policy_losses import Loss, ppo_clip
from whet.algorithms.statistics import masked_mean
from whet.options import Finite, NonNegative, Share
from whet.registry import register_policy_loss


@register_policy_loss("clip_cov", ordered=("lower", "upper"), before={"chosen": "choose_within"})
def clip_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    chosen: Tensor,
    *,
    clip_ratio_low: Share = 0.2,
    clip_ratio_high: NonNegative = 0.2,
    share: Share = 2e-4,
    lower: Finite = 1.0,
    upper: Finite = 5.0,
) -> Loss:
    """PPO's clipped loss, without gradient on the `chosen` tokens, which have lower < cov < upper.   -> [B, R]

    At least one token, and at most a fraction `share` of all, drawn at random from the tokens within the bounds.
    """
    loss, diagnostics = ppo_clip(
        log_probs, old_log_probs, advantages, clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high
    )
    detached = chosen != 0
    return torch.where(detached, loss.detach(), loss), {**diagnostics, "clip_cov_share": detached}


@register_policy_loss("kl_cov", unbiased=True, before={"chosen": "choose_largest"})
def kl_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    chosen: Tensor,
    *,
    share: Share = 2e-4,
    coef: NonNegative = 1.0,
) -> Loss:
    """-A rho, plus coef abs(l - o) on the `chosen` tokens, the fraction `share` with the largest cov.   -> [B, R]"""
    log_ratio = log_probs - old_log_probs
    loss = -advantages * log_ratio.clamp(-20.0, 20.0).exp()
    places = chosen.nonzero(as_tuple=True)  # few tokens: a product over all would cost more than the rest
    loss = loss.index_put(places, coef * log_ratio[places].abs(), accumulate=True)
    return loss, {"kl_cov_share": chosen != 0}


def choose_within(
    advantages: Tensor,
    old_log_probs: Tensor,
    response_mask: Tensor,
    draws: Tensor,
    *,
    share: Share,
    lower: Finite,
    upper: Finite,
) -> Tensor:
    """Column `chosen` of `clip_cov`, [B, R] bool. `draws` [B, R] are uniform in [0, 1); the smallest are chosen."""
    covariance = covariances(advantages, old_log_probs, response_mask)
    within = ((covariance > lower) & (covariance < upper) & (response_mask != 0)).flatten().nonzero()[:, 0]
    order = draws.flatten()[within].argsort()
    return _flags(within[order[: _count(share, response_mask)]], response_mask)


def choose_largest(advantages: Tensor, old_log_probs: Tensor, response_mask: Tensor, *, share: Share) -> Tensor:
    """Column `chosen` of `kl_cov`, [B, R] bool."""
    covariance = covariances(advantages, old_log_probs, response_mask).masked_fill(response_mask == 0, -torch.inf)
    count = min(_count(share, response_mask), covariance.numel())
    return _flags(covariance.flatten().topk(count).indices, response_mask) & (response_mask != 0)


def covariances(advantages: Tensor, old_log_probs: Tensor, response_mask: Tensor) -> Tensor:
    """(A - mean A)(o - mean o), means over sampled tokens.   [B, R] -> [B, R]"""
    centred = [column - masked_mean(column, response_mask) for column in (advantages, old_log_probs)]
    return centred[0] * centred[1]


def _count(share: float, response_mask: Tensor) -> int:
    return max(1, int(share * int(response_mask.sum())))


def _flags(places: Tensor, response_mask: Tensor) -> Tensor:
    """[B, R] bool: True at these indices of the flattened batch."""
    flags = torch.zeros(response_mask.numel(), dtype=torch.bool, device=response_mask.device)
    flags[places] = True
    return flags.view(response_mask.shape)
