# SPDX-License-Identifier: Apache-2.0
"""Policy losses for off-policy samples, with different weights of tokens whose probability has changed.

Each returns the loss of every token [B, R], and per-token diagnostics. l is `log_probs`, o is `old_log_probs`,
rho = exp(clamp(l - o, -20, 20)), A is `advantages`, sg stops the gradient.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from whet.algorithms.policy_losses import Loss, ppo_clip
from whet.algorithms.statistics import log_ratio, pick, row_sums
from whet.options import Cap, NonNegative, Share
from whet.registry import register_policy_loss


@register_policy_loss("tis", unbiased=True)
def tis(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> Loss:
    """-sg(clamp(rho, 0, 1)) A l: tokens that have become less likely count less, none counts more.   -> [B, R]

    ROLL's truncated importance sampling.
    """
    weight = log_ratio(log_probs, old_log_probs).exp().detach().clamp(max=1.0)
    return -weight * advantages * log_probs, {"pg_clipfrac": weight == 1.0}


@register_policy_loss("decoupled_ppo", unbiased=True, corrects="trainer against sampler")
def decoupled_ppo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_ratio_low: Share = 0.2,
    clip_ratio_high: NonNegative = 0.2,
    cap: Cap = 2.0,
) -> Loss:
    """PPO's clipped loss around o times min(exp(o - u), cap), u the rollout's log-probs.   -> [B, R]

    The clip keeps the policy near the trainer's before the update (o); the weight corrects for the policy that sampled.
    Fu et al. 2025 (AReaL), https://arxiv.org/abs/2505.24298.
    """
    loss, diagnostics = ppo_clip(
        log_probs, old_log_probs, advantages, clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high
    )
    weight = log_ratio(old_log_probs, rollout_log_probs).exp().clamp(max=cap)
    return weight * loss, {**diagnostics, "behaviour_weight": weight}


@register_policy_loss("topr", unbiased=True)
def topr(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    accuracy: Tensor,
    response_mask: Tensor,
    *,
    level: Literal["trajectory", "token"] = "trajectory",
    right_weight: NonNegative = 1.0,
    wrong_weight: NonNegative = 1.0,
) -> Loss:
    """-A l on correct rows, -sg(clamp(ratio, 0, 1)) A l on wrong ones: only unlearning is weighted.   -> [B, R]

    The ratio is of the whole trajectory (the paper), or with level="token" of each token (ROLL).
    Le Roux et al. 2025, https://arxiv.org/abs/2503.14286.
    """
    ratio = log_ratio(log_probs, old_log_probs).exp().detach()
    if level == "trajectory":
        ratio = (log_probs - old_log_probs).sum(-1).detach().clamp(-20.0, 20.0).exp()[:, None]
    right = (accuracy >= 1.0)[:, None]
    weight = torch.where(right, ratio.new_tensor(right_weight), wrong_weight * ratio.clamp(max=1.0))
    return -weight * advantages * log_probs, {}


@register_policy_loss("dppo_tv", unbiased=True)
def dppo_tv(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_ratio_low: Share = 0.2,
    clip_ratio_high: Share = 0.2,
    cap: Cap = 20.0,
) -> Loss:
    """-A sg(min(rho, c)) l where the change of a token's probability p is within bounds, else 0.   -> [B, R]

    A > 0 allows p - p_o <= high, A < 0 allows p - p_o >= -low. For a rare token a ratio is misleading: from 1e-5 to
    1e-4 is a factor of ten but a small change. In the paper o is the rollout's log-probs
    (`algorithm.old_log_probs=rollout`). https://arxiv.org/abs/2602.04879.
    """
    moved = (log_probs.exp() - old_log_probs.exp()).detach()
    allowed = torch.where(advantages > 0, moved <= clip_ratio_high, moved >= -clip_ratio_low)
    return _allowed(log_probs, old_log_probs, advantages, allowed, cap)


@register_policy_loss("dppo_kl", unbiased=True)
def dppo_kl(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, threshold: NonNegative = 0.05, cap: Cap = 20.0
) -> Loss:
    """`dppo_tv` with another mask: p moved against A's sign, or KL(Bernoulli(p_o), Bernoulli(p)) <= threshold.

    -> [B, R]   https://arxiv.org/abs/2602.04879.
    """
    p, p_old = log_probs.detach().exp(), old_log_probs.exp()
    rest, rest_old = (1 - p).clamp(min=1e-6), (1 - p_old).clamp(min=1e-6)
    divergence = p_old * (old_log_probs - log_probs.detach()) + rest_old * (rest_old.log() - rest.log())
    against = torch.where(advantages > 0, p <= p_old, p >= p_old)
    return _allowed(log_probs, old_log_probs, advantages, against | (divergence <= threshold), cap)


@register_policy_loss("dro", unbiased=True, aliases=("kimi15",))
def dro(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    beta: NonNegative = 1.0,
    level: Literal["token", "sequence"] = "token",
) -> Loss:
    """-(A l - beta/2 (l - o)^2): a quadratic penalty to the old policy, without a ratio.   -> [B, R]

    With level="sequence" the penalty is beta/2 (sum_t(l - o))^2, spread evenly over the row's tokens.
    Richemond et al. 2024, https://arxiv.org/abs/2405.19107; Kimi k1.5, https://arxiv.org/abs/2501.12599.
    """
    moved = log_probs - old_log_probs
    penalty = moved.square()
    if level == "sequence":
        lengths = response_mask.sum(-1).clamp(min=1)
        penalty = (row_sums(moved, response_mask).square() / lengths)[:, None].expand_as(moved)
    return 0.5 * beta * penalty - advantages * log_probs, {}


@register_policy_loss("vespo", aggregation="token-mean")
def vespo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    k_pos: NonNegative = 2.0,
    lambda_pos: NonNegative = 3.0,
    k_neg: NonNegative = 3.0,
    lambda_neg: NonNegative = 2.0,
) -> Loss:
    """-sg(phi(w)) A l, phi(w) = e^lambda w^k e^(-lambda w), w the ratio of the sequence, k and lambda by A's sign.

    A weight without a clip: 1 on-policy, falling smoothly to 0 on both sides.   -> [B, R]
    https://arxiv.org/abs/2602.10693.
    """
    lowest, highest = -18.420680743952367, 20.0  # log(1e-8) and 20, the clamp of the authors' code
    token = (log_probs - old_log_probs).detach().clamp(-20.0, 20.0)
    log_w = token.sum(-1).clamp(lowest, highest)[:, None]
    k, rate = (pick(advantages >= 0, pos, neg, log_w) for pos, neg in ((k_pos, k_neg), (lambda_pos, lambda_neg)))
    phi = (rate + k * log_w - rate * log_w.exp()).exp()
    return -phi * advantages * log_probs, {"vespo_phi": phi}


def _allowed(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, allowed: Tensor, cap: float) -> Loss:
    """-A sg(min(rho, cap)) l where `allowed`, else 0."""
    weight = log_ratio(log_probs, old_log_probs).exp().detach().clamp(max=cap) * allowed
    return -advantages * weight * log_probs, {"pg_clipfrac": ~allowed}
