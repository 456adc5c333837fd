# SPDX-License-Identifier: Apache-2.0
"""Policy losses. Each returns the loss of every token [B, R], and per-token diagnostics, whose mean over the sampled
tokens is reported (as `actor/<name>`, under verl's names). A loss does not aggregate tokens; a loss that is defined for
one aggregation names it in its decorator. The objective measures `actor/ppo_kl` for all losses.

l is `log_probs`, o is `old_log_probs`, rho = exp(clamp(l - o, -20, 20)), A is `advantages`, sg stops the gradient.

Losses that preserve entropy choose tokens by cov = (A - mean A)(o - mean o), with means over the sampled tokens of the
mini-batch: few tokens with a high cov reduce entropy most. The choice depends on all tokens of the mini-batch, and a
loss sees only the rows of its micro-batch; so the choice is made before the update, with the old policy."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from annotated_types import Gt
from torch import Tensor

from whet.algorithms.statistics import log_ratio, masked_mean, pick, row_means, row_sums, segment_means
from whet.options import Cap, Finite, NonNegative, Positive, Share
from whet.registry import register_policy_loss

Loss = tuple[Tensor, dict[str, Tensor]]


@register_policy_loss("ppo_clip", unbiased=True, aliases={"vanilla": {"clip_ratio_c": 3.0}})
def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_ratio_low: Share = 0.2,
    clip_ratio_high: NonNegative = 0.2,
    clip_ratio_c: Annotated[float, Gt(1)] | None = None,
) -> Loss:
    """max(-A rho, -A clamp(rho, 1 - low, 1 + high)) with rho = exp(clamp(l - o, -20, 20)).   -> [B, R]

    With a dual clip c > 1 the loss is at most -A c where A < 0: a token with a huge ratio cannot dominate the step.
    Schulman et al. 2017, https://arxiv.org/abs/1707.06347; dual clip: Ye et al. 2019, https://arxiv.org/abs/1912.09729;
    different low and high: Yu et al. 2025 (DAPO), https://arxiv.org/abs/2503.14476.
    """
    ratio = log_ratio(log_probs, old_log_probs).exp()
    loss, diagnostics = _clipped_surrogate(ratio, advantages, clip_ratio_low, clip_ratio_high, clip_ratio_c)
    if clip_ratio_c is not None:
        diagnostics["pg_clipfrac_lower"] = (advantages < 0) & (ratio > clip_ratio_c)
    return loss, diagnostics


@register_policy_loss("gspo", aggregation="seq-mean-token-mean")
def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: Share = 3e-4,
    clip_ratio_high: NonNegative = 4e-4,
    level: Literal["sequence", "segment"] = "sequence",
) -> Loss:
    """PPO's clipped loss on the ratio of the whole sequence, s = exp(mean_t(l - o)), log s at most 10.   -> [B, R]

    ratio_t = sg(s) exp(l - sg(l)) has the value s and the gradient of its own token, so that advantages may differ by
    token (GSPO-token); with one advantage per row the mean over tokens has the gradient of -A s. With level="segment"
    the mean is over a run of sampled tokens, such as a turn between replies of a tool (ROLL, ratio_type=segment). Zheng
    et al. 2025, https://arxiv.org/abs/2507.18071."""
    moved = (log_probs - old_log_probs).detach()
    means = row_means(moved, response_mask)[:, None] if level == "sequence" else segment_means(moved, response_mask)
    ratio = means.clamp(max=10.0).exp() * (log_probs - log_probs.detach()).exp()
    return _clipped_surrogate(ratio, advantages, clip_ratio_low, clip_ratio_high)


@register_policy_loss("delta", unbiased=True)
def delta(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_ratio_low: Share = 0.2,
    clip_ratio_high: NonNegative = 0.2,
    delta: Annotated[float, Gt(1)] = 2.0,
) -> Loss:
    """max(-A min(rho, delta), -A clamp(rho, 1 - low, 1 + high)): bounds the ratio also where A < 0.   -> [B, R]

    rho is exp(log_probs - old_log_probs). INTELLECT-2's two-sided clip (https://arxiv.org/abs/2505.07291), TRL's name.
    """
    ratio = log_ratio(log_probs, old_log_probs).exp()
    near = ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    loss = torch.maximum(-advantages * ratio.clamp(max=delta), -advantages * near)
    return loss, {"pg_clipfrac": loss.detach() != -advantages * ratio.detach()}


@register_policy_loss("luspo", unbiased=True, aggregation="seq-mean-token-sum")
def luspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: Share = 3e-4,
    clip_ratio_high: NonNegative = 4e-4,
) -> Loss:
    """GSPO's clipped sequence ratio on every token, summed instead of averaged: rows are weighted by their length.

    s = exp(mean_t(l - o)) with its own gradient, as in TRL; one advantage per row.   -> [B, R]
    https://arxiv.org/abs/2602.05261.
    """
    ratio = row_means(log_probs - old_log_probs, response_mask).clamp(max=10.0).exp()[:, None]
    return _clipped_surrogate(ratio, advantages, clip_ratio_low, clip_ratio_high)


@register_policy_loss("cispo", unbiased=True)
def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_ratio_low: Share = 0.2,
    clip_ratio_high: Cap = 0.2,
    bounds: Literal["relative", "cap", "absolute"] = "relative",
) -> Loss:
    """-sg(clamp(rho, lower, upper)) A l: clips the weight, so every token keeps a gradient.   -> [B, R]

    `bounds` defines lower and upper: "relative" 1 - low and 1 + high (verl, slime, SkyRL, NeMo), "cap" 0 and
    `clip_ratio_high` (TRL), "absolute" `clip_ratio_low` and `clip_ratio_high` (Tinker).
    MiniMax 2025, https://arxiv.org/abs/2506.13585.
    """
    lower, upper = {
        "relative": (1.0 - clip_ratio_low, 1.0 + clip_ratio_high),
        "cap": (0.0, clip_ratio_high),
        "absolute": (clip_ratio_low, clip_ratio_high),
    }[bounds]
    ratio = log_ratio(log_probs, old_log_probs).detach().exp()
    clipped = (ratio < lower) | (ratio > upper)
    return -ratio.clamp_(lower, upper) * advantages * log_probs, {"pg_clipfrac": clipped}


@register_policy_loss("sapo", aggregation="seq-mean-token-mean")
def sapo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, tau_pos: Positive = 1.0, tau_neg: Positive = 1.05
) -> Loss:
    """-A (4 / tau) sigmoid(tau (rho - 1)), tau by the sign of A: a smooth gate instead of a clip.   -> [B, R]

    rho is exp(log_probs - old_log_probs). At rho = 1 the gradient equals the gradient of -A rho.
    https://arxiv.org/abs/2511.20347."""
    ratio = log_ratio(log_probs, old_log_probs).exp()
    tau = pick(advantages > 0, tau_pos, tau_neg, ratio)
    gate = torch.sigmoid(tau * (ratio - 1.0))
    return -4.0 * advantages / tau * gate, {}


@register_policy_loss("geo_mean", aggregation="seq-mean-token-mean", aliases=("gmpo",))
def geo_mean(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: NonNegative = 0.4,
    clip_ratio_high: NonNegative = 0.4,
) -> Loss:
    """-mean_t(A) exp(mean_t x_t), x_t = sgn(A) min(sgn(A) k_t, sgn(A) clamp(k_t, -low, high)), k = l - o.   -> [B, R]

    It has the geometric instead of the arithmetic mean of clipped ratios: one number per row, on each of its tokens.
    Zhao et al. 2025 (GMPO), https://arxiv.org/abs/2507.20673.
    """
    moved = log_ratio(log_probs, old_log_probs)
    kept = torch.where(advantages < 0, moved.clamp(min=-clip_ratio_low), moved.clamp(max=clip_ratio_high))
    kept = kept.masked_fill(advantages == 0, 0.0)  # sgn(0) is 0
    loss = -row_means(advantages, response_mask) * row_means(kept, response_mask).exp()
    clipped = kept.detach() != moved
    return loss[:, None].expand(response_mask.shape), {"pg_clipfrac": clipped}


@register_policy_loss("sppo", aggregation="seq-mean-token-mean")
def sppo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, *, eta: Positive = 1.0
) -> Loss:
    """(sum_t(l - o) - eta (p - 1/2))^2; the estimator `win_rate` gives a row's advantage p - 1/2.   -> [B, R]

    Regression of the sequence's log-ratio to its win rate p: one number per row, on each of its tokens.
    Wu et al. 2024, https://arxiv.org/abs/2405.00675.
    """
    moved = row_sums(log_probs - old_log_probs, response_mask)
    target = eta * row_means(advantages, response_mask)
    return (moved - target).square()[:, None].expand(response_mask.shape), {}


@register_policy_loss("reinforce", unbiased=True, aliases=("gpg",))
def reinforce(log_probs: Tensor, advantages: Tensor) -> Loss:
    """-A l: the plain policy gradient, correct only for samples of the policy that is being updated.   -> [B, R]

    Williams 1992, https://doi.org/10.1007/BF00992696.
    """
    return -advantages * log_probs, {}


@register_policy_loss("tis", unbiased=True)
def tis(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> Loss:
    """-sg(clamp(rho, 0, 1)) A l: a token that became less likely weighs less, no token more than 1.   -> [B, R]

    ROLL's truncated importance sampling. l is `log_probs`, rho exp(l - old_log_probs); sg stops the gradient."""
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
    """PPO's clipped loss on the ratio exp(l - o), times the weight min(exp(o - u), cap).   -> [B, R]

    l is `log_probs`, o `old_log_probs`, u `rollout_log_probs`. The clip keeps the policy near the trainer's policy
    before the update (o); the weight corrects for the policy that sampled (u).
    Fu et al. 2025 (AReaL), https://arxiv.org/abs/2505.24298."""
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
    """-A l on correct rows, -sg(clamp(ratio, 0, 1)) A l on wrong ones: only wrong rows have a weight.   -> [B, R]

    l is `log_probs`. The ratio is of the whole trajectory (the paper), or with level="token" of each token (ROLL).
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
    """-A sg(min(rho, cap)) l where the change of a token's probability p is within bounds, else 0.   -> [B, R]

    A > 0 allows p - p_old <= high, A < 0 allows p - p_old >= -low; l is `log_probs`, rho = p / p_old. For a rare token
    a ratio is misleading: from 1e-5 to 1e-4 is a factor of ten but a small change. In the paper p_old is the rollout's
    (`algorithm.correction.old_log_probs=rollout`). https://arxiv.org/abs/2602.04879.
    """
    moved = (log_probs.exp() - old_log_probs.exp()).detach()
    allowed = torch.where(advantages > 0, moved <= clip_ratio_high, moved >= -clip_ratio_low)
    return _allowed(log_probs, old_log_probs, advantages, allowed, cap)


@register_policy_loss("dppo_kl", unbiased=True)
def dppo_kl(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, threshold: NonNegative = 0.05, cap: Cap = 20.0
) -> Loss:
    """`dppo_tv` with another mask: keeps a token if its probability p moved against the sign of A, or by a small KL.

    Small is KL(Bernoulli(p_old), Bernoulli(p)) <= threshold.   -> [B, R]   https://arxiv.org/abs/2602.04879.
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

    phi is a weight without a clip: 1 on-policy, falling smoothly to 0 on both sides.   -> [B, R]
    https://arxiv.org/abs/2602.10693."""
    lowest, highest = -18.420680743952367, 20.0  # log(1e-8) and 20, the clamp of the authors' code
    token = (log_probs - old_log_probs).detach().clamp(-20.0, 20.0)
    log_w = token.sum(-1).clamp(lowest, highest)[:, None]
    k, rate = (pick(advantages >= 0, pos, neg, log_w) for pos, neg in ((k_pos, k_neg), (lambda_pos, lambda_neg)))
    phi = (rate + k * log_w - rate * log_w.exp()).exp()
    return -phi * advantages * log_probs, {"vespo_phi": phi}


def _allowed(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, allowed: Tensor, cap: float) -> Loss:
    """-A sg(min(rho, cap)) log_probs where `allowed`, else 0; rho = exp(log_probs - old_log_probs)."""
    weight = log_ratio(log_probs, old_log_probs).exp().detach().clamp(max=cap) * allowed
    return -advantages * weight * log_probs, {"pg_clipfrac": ~allowed}


def _clipped_surrogate(
    ratio: Tensor, advantages: Tensor, low: float, high: float, largest: float | None = None
) -> Loss:
    """Returns max(-A ratio, -A clamp(ratio, 1 - low, 1 + high)), at most -A largest if A < 0; and flags clipped tokens.

    Computed as -A times the ratio, bounded above where A is positive and below where A is negative.
    """
    is_negative = advantages < 0
    bounded = torch.where(is_negative, ratio.clamp(1.0 - low, largest), ratio.clamp(max=1.0 + high))
    clipped = torch.where(is_negative, ratio < 1.0 - low, (ratio > 1.0 + high) & (advantages > 0))
    return -advantages * bounded, {"pg_clipfrac": clipped}


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

    cov is the covariance of advantage and log-prob (`covariances`). The chosen tokens are drawn at random from the
    tokens within the bounds: at most a fraction `share` of all tokens, or one token if the fraction is below one."""
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
    """-A rho, plus coef abs(log rho) on the `chosen` tokens: the `share` with the largest covariances.   -> [B, R]"""
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
    """Computes the column `chosen` of `clip_cov`: random tokens with lower < covariance < upper.   -> [B, R] bool

    `draws` [B, R] are uniform in [0, 1); the tokens with the smallest draws are chosen."""
    covariance = covariances(advantages, old_log_probs, response_mask)
    within = ((covariance > lower) & (covariance < upper) & (response_mask != 0)).flatten().nonzero()[:, 0]
    order = draws.flatten()[within].argsort()
    return _flags(within[order[: _count(share, response_mask)]], response_mask)


def choose_largest(advantages: Tensor, old_log_probs: Tensor, response_mask: Tensor, *, share: Share) -> Tensor:
    """Computes the column `chosen` of `kl_cov`: the `share` of tokens with the largest covariance.   -> [B, R] bool"""
    covariance = covariances(advantages, old_log_probs, response_mask).masked_fill(response_mask == 0, -torch.inf)
    count = min(_count(share, response_mask), covariance.numel())
    return _flags(covariance.flatten().topk(count).indices, response_mask) & (response_mask != 0)


def covariances(advantages: Tensor, old_log_probs: Tensor, response_mask: Tensor) -> Tensor:
    """(A - mean A)(o - mean o), A `advantages`, o `old_log_probs`, means over sampled tokens.   [B, R] -> [B, R]"""
    centred = [column - masked_mean(column, response_mask) for column in (advantages, old_log_probs)]
    return centred[0] * centred[1]


def _count(share: float, response_mask: Tensor) -> int:
    return max(1, int(share * int(response_mask.sum())))


def _flags(places: Tensor, response_mask: Tensor) -> Tensor:
    """True at the indices `places` of the flattened batch.   -> [B, R] bool"""
    flags = torch.zeros(response_mask.numel(), dtype=torch.bool, device=response_mask.device)
    flags[places] = True
    return flags.view(response_mask.shape)
