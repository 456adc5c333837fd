# SPDX-License-Identifier: Apache-2.0
"""Advantage estimators. Each returns [B, R]; or [B] where it is constant over a row; or (advantages, returns).

s is the sum of a row's `token_level_rewards` over its sampled tokens; G the rows with its `uid`, n of them; mu_G and
sd_G mean and sample (n - 1) standard deviation of s over G. A group of one carries no signal: its advantage is 0.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from whet.algorithms.scan import reverse_scan, reward_to_go
from whet.algorithms.statistics import Groups, row_sums, whiten
from whet.registry import register_adv_est


@register_adv_est("gae")
def gae(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the sampled tokens, whitened; returns = L + V.   -> [B, R], [B, R]

        d_t = r_t + gamma V_next - V_t        L_t = d_t + gamma lam L_next        A = whiten(L)

    `next` is the next sampled token: (V_next, L_next) passes over text that the policy did not sample unchanged, and is
    (0, 0) after the last sampled token, so that no value is taken from padding.
    Schulman et al. 2015, https://arxiv.org/abs/1506.02438.
    """
    upcoming = reverse_scan(values, response_mask, 0.0)  # V of the first sampled token at or after t
    next_values = pad(upcoming[:, 1:], (0, 1))
    deltas = token_level_rewards + gamma * next_values - values
    advantages = reverse_scan(deltas, response_mask, gamma * lam)
    returns = (advantages + values).masked_fill(response_mask == 0, 0.0)
    return whiten(advantages, response_mask), returns


@register_adv_est("grpo")
def grpo(token_level_rewards: Tensor, response_mask: Tensor, uid: Tensor, *, std_norm: bool = True) -> Tensor:
    """A = (s - mu_G) / (sd_G + 1e-6), or s - mu_G without `std_norm`.   -> [B]

    Shao et al. 2024, https://arxiv.org/abs/2402.03300.
    """
    scores = row_sums(token_level_rewards, response_mask)
    groups = Groups(uid, response_mask)
    deviation = groups.deviation(scores)
    return deviation / (groups.std(scores) + 1e-6) if std_norm else deviation


@register_adv_est("dr_grpo", aggregation="seq-mean-token-sum-norm")
def dr_grpo(token_level_rewards: Tensor, response_mask: Tensor, uid: Tensor) -> Tensor:
    """A = s - mu_G: `grpo` without the division by sd_G, which weighs easy and hard prompts up.   -> [B]

    The other half of Dr.GRPO is an aggregation that does not divide by a row's own length.
    Liu et al. 2025, https://arxiv.org/abs/2503.20783.
    """
    return grpo(token_level_rewards, response_mask, uid, std_norm=False)


@register_adv_est("rloo")
def rloo(token_level_rewards: Tensor, response_mask: Tensor, uid: Tensor) -> Tensor:
    """A = n / (n - 1) (s - mu_G), which is s minus the mean score of the others in G.   -> [B]

    Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740.
    """
    scores = row_sums(token_level_rewards, response_mask)
    groups = Groups(uid, response_mask)
    leave_one_out = groups.size / (groups.size - 1).clamp(min=1)
    return groups.deviation(scores) * leave_one_out.to(scores.dtype)


@register_adv_est("reinforce_plus_plus")
def reinforce_plus_plus(
    token_level_rewards: Tensor, response_mask: Tensor, *, gamma: float = 1.0
) -> tuple[Tensor, Tensor]:
    """R_t = r_t + gamma R_{t+1} over sampled tokens; A = whiten(R).   -> A [B, R], R [B, R]

    No critic and no group: the baseline is the mean over all sampled tokens of the batch.
    Hu et al. 2025, https://arxiv.org/abs/2501.03262.
    """
    returns = reward_to_go(token_level_rewards, response_mask, gamma)
    return whiten(returns, response_mask), returns
