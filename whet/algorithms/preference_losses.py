# SPDX-License-Identifier: Apache-2.0
"""Preference losses. Each returns the loss of every comparison, and the reward [B] that it implies for each response.

Rows are responses. l is `log_probs`, b is `ref_log_probs` [B, R]; S sums over the tokens of a response, M is their
mean, sigma is the logistic function. The argument `of` of a loss's decorator says what a comparison is:

- pair: rows 2i and 2i + 1, of which the first is the better (w) and the second the worse (v); losses are [B / 2]
- label: one row, good where `label` is 1 and bad where it is 0; losses are [B]
- list: the rows with one `uid`, ordered by `scores`; losses are [B], summed over the rows of a list

The objective divides the sum of the losses by the number of comparisons of the whole batch."""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from annotated_types import Gt, Lt
from torch import Tensor

from whet.algorithms.statistics import row_means, row_sums
from whet.options import NonNegative, Positive, Share
from whet.registry import register_preference_loss

Loss = tuple[Tensor, Tensor]


def pair_differences(rewards: Tensor) -> Tensor:
    """Subtracts the second reward of each pair of adjacent rows from the first: r_w - r_v.   [B] -> [B / 2]"""
    return rewards[::2] - rewards[1::2]


def pairs_of(order: Tensor, uid: Tensor) -> Tensor:
    """Lists the pairs of rows with the same `uid`, the row with the higher `order` first. A row with order 0 and rows
    with equal orders are in no pair.   [B], [B] -> row numbers [P, 2]"""
    rows = order.nonzero()[:, 0]
    order, uid = order[rows], uid[rows]
    return rows[((uid[:, None] == uid) & (order[:, None] > order)).nonzero()]


def _imitation(log_probs: Tensor, response_mask: Tensor) -> Tensor:
    """SFT loss of the better responses: the negative mean of their log-probs.   [B, R] -> [B / 2]"""
    return -row_means(log_probs, response_mask)[::2]


@register_preference_loss("dpo", of="pair", aliases={"rpo": {"sft_coef": 1.0}})
def dpo(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    response_mask: Tensor,
    *,
    beta: Positive = 0.1,
    label_smoothing: Share = 0.0,
    sft_coef: NonNegative = 0.0,
) -> Loss:
    """-(1 - e) log sigma(h) - e log sigma(-h) + c (-M(l_w)), h = r_w - r_v, r = beta S(l - b).   -> [B / 2], [B]

    S sums over the tokens of a response, M is their mean; w is the better and v the worse response of a pair. e is
    `label_smoothing`, c `sft_coef`. Rafailov et al. 2023, https://arxiv.org/abs/2305.18290; e (conservative DPO):
    Mitchell 2023, https://ericmitchell.ai/cdpo.pdf; c (RPO): Pang et al. 2024, https://arxiv.org/abs/2404.19733.
    """
    rewards = beta * row_sums(log_probs - ref_log_probs, response_mask)
    difference = pair_differences(rewards)
    loss = -(1 - label_smoothing) * F.logsigmoid(difference) - label_smoothing * F.logsigmoid(-difference)
    return loss + sft_coef * _imitation(log_probs, response_mask) if sft_coef else loss, rewards


@register_preference_loss("robust_dpo", of="pair")
def robust_dpo(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    response_mask: Tensor,
    *,
    beta: Positive = 0.1,
    label_smoothing: Annotated[float, Gt(0), Lt(0.5)] = 0.1,
) -> Loss:
    """(-(1 - e) log sigma(h) + e log sigma(-h)) / (1 - 2e): unbiased where a share e of the pairs is swapped.

    h and r as in `dpo`.   -> [B / 2], [B].   Chowdhury et al. 2024, https://arxiv.org/abs/2403.00409.
    """
    rewards = beta * row_sums(log_probs - ref_log_probs, response_mask)
    difference = pair_differences(rewards)
    loss = -(1 - label_smoothing) * F.logsigmoid(difference) + label_smoothing * F.logsigmoid(-difference)
    return loss / (1 - 2 * label_smoothing), rewards


@register_preference_loss("ipo", of="pair")
def ipo(
    log_probs: Tensor, ref_log_probs: Tensor, response_mask: Tensor, *, beta: Positive = 0.1, per_token: bool = True
) -> Loss:
    """(M_w - M_v - 1 / (2 beta))^2 with M = M(l - b), or sums S where `per_token` is false.   -> [B / 2], [B]

    Azar et al. 2023, https://arxiv.org/abs/2310.12036, whose formula has sums; means are the form in use.
    """
    sums = row_sums(log_probs - ref_log_probs, response_mask)
    moved = row_means(log_probs - ref_log_probs, response_mask) if per_token else sums
    return (pair_differences(moved) - 0.5 / beta).square(), beta * sums


@register_preference_loss("hinge", of="pair")
def hinge(log_probs: Tensor, ref_log_probs: Tensor, response_mask: Tensor, *, beta: Positive = 0.1) -> Loss:
    """max(0, 1 - h), h and r as in `dpo`.   -> [B / 2], [B]

    Zhao et al. 2023 (SLiC), https://arxiv.org/abs/2305.10425, with the margin of Liu et al. 2023 (RSO),
    https://arxiv.org/abs/2309.06657.
    """
    rewards = beta * row_sums(log_probs - ref_log_probs, response_mask)
    return F.relu(1 - pair_differences(rewards)), rewards


@register_preference_loss("simpo", of="pair")
def simpo(
    log_probs: Tensor,
    response_mask: Tensor,
    *,
    beta: Positive = 2.0,
    gamma: NonNegative = 1.0,
    label_smoothing: Share = 0.0,
) -> Loss:
    """-(1 - e) log sigma(h) - e log sigma(-h), h = r_w - r_v - gamma, r = beta M(l): without reference.

    -> [B / 2], [B].   Meng et al. 2024, https://arxiv.org/abs/2405.14734.
    """
    rewards = beta * row_means(log_probs, response_mask)
    difference = pair_differences(rewards) - gamma
    return -(1 - label_smoothing) * F.logsigmoid(difference) - label_smoothing * F.logsigmoid(-difference), rewards


@register_preference_loss("orpo", of="pair")
def orpo(log_probs: Tensor, response_mask: Tensor, *, beta: Positive = 0.1) -> Loss:
    """-M(l_w) - beta log sigma(r_w - r_v), r = log odds of exp(M(l)) = M - log(1 - exp(M)).   -> [B / 2], [B]

    Hong et al. 2024, https://arxiv.org/abs/2403.07691.
    """
    means = row_means(log_probs, response_mask).clamp(max=-1e-7)  # a response of probability 1 has no odds
    odds = means - torch.log(-torch.expm1(means))
    return _imitation(log_probs, response_mask) - beta * F.logsigmoid(pair_differences(odds)), odds


@register_preference_loss("cpo", of="pair")
def cpo(
    log_probs: Tensor,
    response_mask: Tensor,
    *,
    beta: Positive = 0.1,
    sft_coef: NonNegative = 1.0,
    label_smoothing: Share = 0.0,
) -> Loss:
    """-(1 - e) log sigma(h) - e log sigma(-h) + c (-M(l_w)), h = r_w - r_v, r = beta S(l): DPO without a reference.

    -> [B / 2], [B].   c is `sft_coef`, e `label_smoothing`. Xu et al. 2024, https://arxiv.org/abs/2401.08417.
    """
    rewards = beta * row_sums(log_probs, response_mask)
    difference = pair_differences(rewards)
    loss = -(1 - label_smoothing) * F.logsigmoid(difference) - label_smoothing * F.logsigmoid(-difference)
    return loss + sft_coef * _imitation(log_probs, response_mask), rewards


@register_preference_loss("apo_zero", of="pair")
def apo_zero(log_probs: Tensor, ref_log_probs: Tensor, response_mask: Tensor, *, beta: Positive = 0.1) -> Loss:
    """1 - sigma(r_w) + sigma(r_v), r = beta S(l - b): raises the better, lowers the worse.   -> [B / 2], [B]

    For data whose better responses are better than the model's. D'Oosterlinck et al. 2024,
    https://arxiv.org/abs/2408.06266.
    """
    rewards = beta * row_sums(log_probs - ref_log_probs, response_mask)
    return 1 - rewards[::2].sigmoid() + rewards[1::2].sigmoid(), rewards


@register_preference_loss("apo_down", of="pair")
def apo_down(log_probs: Tensor, ref_log_probs: Tensor, response_mask: Tensor, *, beta: Positive = 0.1) -> Loss:
    """sigma(r_w) + 1 - sigma(r_w - r_v), r = beta S(l - b): lowers both, the worse one more.   -> [B / 2], [B]

    For data whose better responses are worse than the model's. D'Oosterlinck et al. 2024,
    https://arxiv.org/abs/2408.06266.
    """
    rewards = beta * row_sums(log_probs - ref_log_probs, response_mask)
    return rewards[::2].sigmoid() + 1 - pair_differences(rewards).sigmoid(), rewards


@register_preference_loss("exo", of="pair")
def exo(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    response_mask: Tensor,
    *,
    beta: Positive = 0.1,
    label_smoothing: Annotated[float, Gt(0), Lt(0.5)] = 1e-3,
) -> Loss:
    """KL(p || q), p = (sigma(h), sigma(-h)), q = (1 - e, e): the reverse of the KL that `dpo` minimises.

    h and r as in `dpo`, e is `label_smoothing`.   -> [B / 2], [B].   Ji et al. 2024, https://arxiv.org/abs/2402.00856.
    """
    rewards = beta * row_sums(log_probs - ref_log_probs, response_mask)
    difference = pair_differences(rewards)
    target = difference.new_tensor([1 - label_smoothing, label_smoothing]).log()
    sides = ((difference, target[0]), (-difference, target[1]))
    loss = torch.stack([side.sigmoid() * (F.logsigmoid(side) - wanted) for side, wanted in sides]).sum(0)
    return loss, rewards


@register_preference_loss("wpo", of="pair", unbiased=False)
def wpo(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    sum_pi_squared: Tensor,
    response_mask: Tensor,
    *,
    beta: Positive = 0.1,
    label_smoothing: Share = 0.0,
) -> Loss:
    """`dpo` times min(1, w_w w_v), w = sg(exp(M(l - log sum_v pi_v^2))): pairs that the policy would write count more.

    -> [B / 2], [B].   Zhou et al. 2024, https://arxiv.org/abs/2406.11827, with its alignment of weights.
    """
    losses, rewards = dpo(log_probs, ref_log_probs, response_mask, beta=beta, label_smoothing=label_smoothing)
    sampled = response_mask != 0
    expected = torch.where(sampled, sum_pi_squared, 1.0).log()
    likeness = row_means((log_probs - expected).detach(), response_mask)
    return losses * (likeness[::2] + likeness[1::2]).exp().clamp(max=1.0), rewards


@register_preference_loss("kto", of="label")
def kto(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    response_mask: Tensor,
    label: Tensor,
    reference_point: Tensor,
    *,
    beta: Positive = 0.1,
    good_weight: NonNegative = 1.0,
    bad_weight: NonNegative = 1.0,
) -> Loss:
    """w_good (1 - sigma(r - z)) of good responses, w_bad (1 - sigma(z - r)) of bad ones, r = beta S(l - b).

    -> [B], [B].   z is beta times `reference_point`, the KL of the policy to the reference before the update, at least
    0, estimated on prompts with the responses of other rows. Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306.
    """
    rewards = beta * row_sums(log_probs - ref_log_probs, response_mask)
    distance, is_good = rewards - beta * reference_point, label != 0
    value = torch.where(is_good, distance, -distance).sigmoid()
    weight = torch.where(is_good, good_weight, bad_weight).to(value.dtype)
    return weight * (1 - value), rewards


@register_preference_loss("bco", of="label")
def bco(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    response_mask: Tensor,
    label: Tensor,
    mean_log_ratio: Tensor,
    *,
    beta: Positive = 0.1,
) -> Loss:
    """-log sigma(r - d) of good responses, -log sigma(d - r) of bad ones, r = beta S(l - b): a classifier.

    -> [B], [B].   d is beta times `mean_log_ratio`, the mean S(l - b) of all rows so far, each before its update.
    Jung et al. 2024, https://arxiv.org/abs/2404.04656.
    """
    rewards = beta * row_sums(log_probs - ref_log_probs, response_mask)
    distance = rewards - beta * mean_log_ratio
    return -F.logsigmoid(torch.where(label != 0, distance, -distance)), rewards


@register_preference_loss("plackett_luce", of="list")
def plackett_luce(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    response_mask: Tensor,
    scores: Tensor,
    uid: Tensor,
    *,
    beta: Positive = 0.1,
) -> Loss:
    """-(r_i - log sum_j exp(r_j)) over the responses j of the list with at most the score of i, r = beta S(l - b).

    -> [B], [B].   Rows without tokens are in no list; for two responses it equals `dpo`. Rafailov et al. 2023,
    https://arxiv.org/abs/2305.18290 (appendix A.3); a tie counts as ranked behind (Breslow 1974)."""
    rewards = beta * row_sums(log_probs - ref_log_probs, response_mask)
    is_there = response_mask.bool().any(1)
    behind = (uid[:, None] == uid) & (scores[:, None] >= scores) & is_there
    among = rewards.expand(len(rewards), -1).masked_fill(~behind, -torch.inf)
    losses = torch.where(is_there[:, None], among, 0.0).logsumexp(1) - rewards
    return losses * is_there, rewards
