# SPDX-License-Identifier: Apache-2.0
"""Corrections for the difference between the probabilities of the rollout engine and of the trainer.

u is `rollout_log_probs` (with the rollout's kernels and weights), o `old_log_probs` (the trainer's, before the update),
x = o - u. Weights multiply a token's loss; a rejection removes tokens from the mask, and so from every count. Neither
has a gradient."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from whet.algorithms.statistics import alike, masked_mean, pick, row_means, row_sums, segment_means
from whet.options import Cap, NonNegative, Positive, Share
from whet.registry import register_rejection, register_weight

LARGEST = 20.0  # log-weight; its exp is far beyond any bound


@register_weight("importance", ordered=("floor", "cap"))
def importance(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    *,
    level: Literal["token", "segment", "geometric", "sequence"] = "token",
    cap: Cap = 2.0,
    floor: NonNegative = 0.0,
    normalise: bool = False,
) -> Tensor:
    """max(min(w, cap), floor), with x = old_log_probs - rollout_log_probs and w = exp(x) at `level`.   -> [B, R]

    `level` sets the unit of w: exp(x) of a "token", exp(sum_t x) of the row ("sequence"), exp(mean_t x) of the row
    ("geometric") or of a run of sampled tokens ("segment"). With `normalise`, w is divided by its mean over the sampled
    tokens (or sequences) of the mini-batch, so that the size of a step stays the same.
    Yao et al. 2025, https://fengyao.notion.site/off-policy-rl."""
    weight = ratio(old_log_probs, rollout_log_probs, response_mask, level).clamp(floor, cap)
    if not normalise:
        return weight
    each = (weight, response_mask)
    if level not in ("token", "segment"):
        each = weight[:, :1], response_mask.sum(-1, keepdim=True) > 0
    return weight / masked_mean(*each).clamp(min=1e-8)


@register_weight("icepop")
def icepop(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    *,
    level: Literal["token", "segment", "geometric", "sequence"] = "token",
    low: Share = 0.5,
    high: Annotated[float, Ge(1)] = 5.0,
) -> Tensor:
    """w where low <= w <= high, else 0: drops tokens on which rollout and trainer disagree.   -> [B, R]

    w and its `level` are as in `importance`. Ling team 2025, https://arxiv.org/abs/2510.18855."""
    weight = ratio(old_log_probs, rollout_log_probs, response_mask, level)
    return weight * ((weight >= low) & (weight <= high))


@register_weight("top_entropy")
def top_entropy(entropy: Tensor, response_mask: Tensor, *, share: Annotated[float, Gt(0), Le(1)] = 0.2) -> Tensor:
    """1 on the fraction `share` of the mini-batch's tokens with the highest entropy, 0 on the others.   -> [B, R]

    Wang et al. 2025, https://arxiv.org/abs/2506.01939."""
    sampled = response_mask != 0
    values = entropy[sampled]
    if not values.numel():
        return torch.zeros_like(entropy)
    return ((entropy >= torch.quantile(values, 1.0 - share)) & sampled).to(entropy.dtype)


@register_weight("off_policy_sequence")
def off_policy_sequence(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    threshold: Positive = 2.0,
) -> Tensor:
    """0 on tokens with A < 0 in a row whose mean of u - o exceeds the threshold, else 1.   -> [B, R]

    u is `rollout_log_probs`, o `old_log_probs`, A `advantages`. The policy need not unlearn a text that it has become
    unlikely to sample. DeepSeek-V3.2, https://arxiv.org/abs/2512.02556."""
    moved = row_means(rollout_log_probs - old_log_probs, response_mask)
    return ((advantages >= 0) | (moved <= threshold)[:, None]).to(old_log_probs.dtype)


@register_weight("pf_ppo")
def pf_ppo(
    token_level_scores: Tensor,
    response_mask: Tensor,
    *,
    form: Literal["pow", "max_min", "max_random"] = "pow",
    power: NonNegative = 2.0,
) -> Tensor:
    """Weights of rows by score: "pow" abs(s)^power; "max_min" 1 for the highest and lowest score, else 0; "max_random"
    1 for the highest, else 1/4. They are scaled to a mean of 1 over the mini-batch's rows.   -> [B, R]

    These weights are the expectation of PF-PPO's re-sampling of rows. Shen et al. 2024,
    https://arxiv.org/abs/2409.06957."""
    scores, member = token_level_scores.sum(-1), response_mask.sum(-1) > 0
    if not bool(member.any()):
        return torch.zeros_like(token_level_scores)
    best, worst = scores[member].max(), scores[member].min()
    weight = {
        "pow": scores.abs() ** power,
        "max_min": (alike(scores, best) | alike(scores, worst)).to(scores.dtype),
        "max_random": pick(alike(scores, best), 1.0, 0.25, scores),
    }[form]
    mean = weight[member].mean()
    return (weight / mean.clamp(min=1e-8))[:, None].expand_as(token_level_scores)


@register_rejection("divergence")
def divergence(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    *,
    form: Literal["k1", "k2", "k3"] = "k3",
    level: Literal["token", "sequence_mean", "sequence_sum", "sequence_max"] = "token",
    low: Annotated[float, Le(0)] | None = None,
    high: Annotated[float, Gt(0)] | None = None,
) -> Tensor:
    """True where low <= k <= high (None: no bound): k1 = -x, k2 = x^2 / 2, k3 = exp(x) - 1 - x.   -> [B, R] bool

    x is old_log_probs - rollout_log_probs. `form` chooses k, an estimate of KL(rollout || trainer); `level` chooses the
    bounded value: each token's k, or the row's mean, sum or maximum of k."""
    x = (old_log_probs - rollout_log_probs).clamp(-LARGEST, LARGEST)
    k = {"k1": -x, "k2": 0.5 * x.square(), "k3": x.expm1() - x}[form]
    values = _of_row(k, response_mask, level)
    above = values >= low if low is not None else torch.ones_like(values, dtype=torch.bool)
    return above & (values <= high) if high is not None else above


def gap(old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor) -> dict[str, Tensor]:
    """Computes metrics of the difference between rollout (u) and trainer (o), with x = o - u: mean and largest abs(x),
    KL(u || o) by k3, effective sample size of exp(x) as a fraction of the tokens, chi2(o || u) = mean of exp(x)^2 - 1,
    both perplexities, and the trainer's perplexity divided by the rollout's. Scalars."""
    sampled = response_mask != 0
    x = (old_log_probs - rollout_log_probs).masked_fill(~sampled, 0.0)
    weight = x.clamp(-LARGEST, LARGEST).exp().masked_fill(~sampled, 0.0)
    count = sampled.sum().clamp(min=1)
    return {
        "abs_mean": masked_mean(x.abs(), response_mask),
        "abs_max": x.abs().max() if x.numel() else x.sum(),
        "kl": masked_mean(x.clamp(-LARGEST, LARGEST).expm1() - x, response_mask),
        "effective_sample_size": weight.sum().square() / (count * weight.square().sum()).clamp(min=1e-8),
        "chi2": masked_mean(weight.square(), response_mask) - 1.0,
        "rollout_perplexity": (-masked_mean(rollout_log_probs, response_mask)).exp(),
        "trainer_perplexity": (-masked_mean(old_log_probs, response_mask)).exp(),
        "perplexity_ratio": (-masked_mean(x, response_mask)).exp(),
    }


def weight_metrics(weight: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Computes deviation, minimum and maximum of the weights where the mask is not 0; empty if there is no such token.
    Scalars."""
    values = weight[mask != 0]
    if not values.numel():
        return {}
    return {"std": values.std(correction=0), "min": values.min(), "max": values.max()}


def out_of_bounds(weight: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    """The share of tokens in the mask with a weight below `low` or above `high`. Scalar."""
    return masked_mean((weight < low) | (weight > high), mask)


def ratio(old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor, level: str) -> Tensor:
    """exp of x = o - u, of its mean over a segment or row, or of its sum over a row (`level`); at most exp(20).

    o is `old_log_probs`, u `rollout_log_probs`.   -> [B, R]"""
    x = old_log_probs - rollout_log_probs
    if level == "segment":
        x = segment_means(x, response_mask)
    elif level == "geometric":
        x = row_means(x, response_mask)[:, None].expand_as(x)
    elif level == "sequence":
        x = x.sum(-1, keepdim=True).expand_as(x)
    return x.clamp(-LARGEST, LARGEST).exp()


def _of_row(k: Tensor, response_mask: Tensor, level: str) -> Tensor:
    """Returns k of each token, or the mean, sum or maximum of its row, as `level` says.   [B, R] -> [B, R]"""
    if level == "token":
        return k
    by_row = {
        "sequence_mean": row_means(k, response_mask),
        "sequence_sum": row_sums(k, response_mask),
        "sequence_max": k.masked_fill(response_mask == 0, -torch.inf).amax(-1),
    }
    return by_row[level][:, None].expand_as(k)
