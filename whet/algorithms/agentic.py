# SPDX-License-Identifier: Apache-2.0
"""Advantage estimators for trajectories of several turns, with credit for each turn (a step of an agent).

r_k is the sum of `token_level_rewards` over the sampled tokens of turn k (`turn_ids` [B, R] is the turn of each sampled
token, -1 on other text), G_k = r_k + gamma G_{k+1} the turn's discounted return. All estimators return [B, R].
"""

from __future__ import annotations

import torch
from torch import Tensor

from whet.algorithms.statistics import Groups, reverse_scan
from whet.options import NonNegative, Share
from whet.registry import register_adv_est


@register_adv_est("segment_reinforce", unbiased=True)
def segment_reinforce(
    token_level_rewards: Tensor, turn_ids: Tensor, response_mask: Tensor, *, gamma: Share = 1.0
) -> Tensor:
    """A_t = G_k of the turn k that sampled t: gamma discounts once per turn.   -> [B, R]

    ROLL's "agentic_reinforce".
    """
    returns, _ = turn_returns(token_level_rewards, turn_ids, response_mask, gamma)
    return to_tokens(returns, turn_ids, response_mask)


@register_adv_est("step_reinforce")
def step_reinforce(
    token_level_rewards: Tensor, turn_ids: Tensor, response_mask: Tensor, uid: Tensor, *, gamma: Share = 1.0
) -> Tensor:
    """A_t = (G_k - mean) / (sd + 1e-6), mean and deviation over all turns of all rows of the group.   -> [B, R]

    ROLL's "step_reinforce".
    """
    returns, has_turn = turn_returns(token_level_rewards, turn_ids, response_mask, gamma)
    alone = (Groups(uid, response_mask).size < 2)[:, None]
    compared = _normalised(returns, has_turn, uid[:, None].expand_as(has_turn)).masked_fill(alone, 0.0)
    return to_tokens(compared, turn_ids, response_mask)


@register_adv_est("gigpo")
def gigpo(
    token_level_rewards: Tensor,
    turn_ids: Tensor,
    state_hash: Tensor,
    response_mask: Tensor,
    uid: Tensor,
    *,
    gamma: Share = 0.95,
    episode_weight: NonNegative = 1.0,
    step_weight: NonNegative = 1.0,
    std_norm: bool = True,
) -> Tensor:
    """A = w_ep norm(s over the group) + w_step norm(G_k over the group's turns in the same state).   -> [B, R]

    norm(x) = (x - mean) / (sd + 1e-6), without the division if not `std_norm`. `state_hash` [B, R] identifies the state
    in which a turn was sampled, the same number on all its tokens; a state that occurs once gives 0.
    Feng et al. 2025, https://arxiv.org/abs/2505.10978.
    """
    groups = Groups(uid, response_mask)
    scores = token_level_rewards.sum(-1)
    episode = groups.normalised(scores) if std_norm else groups.deviation(scores)

    returns, has_turn = turn_returns(token_level_rewards, turn_ids, response_mask, gamma)
    sampled = response_mask != 0
    states = torch.zeros_like(has_turn, dtype=torch.int64)
    row, token = sampled.nonzero(as_tuple=True)
    states[row, turn_ids[row, token]] = state_hash[row, token]
    alike = torch.stack([uid[:, None].expand_as(states), states], -1).flatten(0, 1)
    _, alike = torch.unique(alike, dim=0, return_inverse=True)
    step = _normalised(returns, has_turn, alike.view_as(states), std_norm).masked_fill((groups.size < 2)[:, None], 0.0)
    return episode_weight * episode[:, None] + step_weight * to_tokens(step, turn_ids, response_mask)


def turn_returns(
    token_level_rewards: Tensor, turn_ids: Tensor, response_mask: Tensor, gamma: float
) -> tuple[Tensor, Tensor]:
    """Returns G_k [B, K] of K turns, and a mask [B, K] of the turns that a row has."""
    sampled = response_mask != 0
    turns = turn_ids.masked_fill(~sampled, 0)
    width = int(turns.max()) + 1 if turns.numel() else 1
    rewards = token_level_rewards.masked_fill(~sampled, 0.0)
    earned = rewards.new_zeros(len(rewards), width).scatter_add_(1, turns, rewards)
    has_turn = torch.zeros_like(earned).scatter_add_(1, turns, sampled.to(earned.dtype)) > 0
    return reverse_scan(earned, has_turn, gamma), has_turn


def to_tokens(by_turn: Tensor, turn_ids: Tensor, response_mask: Tensor) -> Tensor:
    """[B, K] -> [B, R]: each sampled token gets the value of its turn, others 0."""
    outside = response_mask == 0
    return by_turn.gather(1, turn_ids.masked_fill(outside, 0)).masked_fill(outside, 0.0)


def _normalised(returns: Tensor, has_turn: Tensor, group: Tensor, std_norm: bool = True) -> Tensor:
    """(x - mean) / (sd + 1e-6) over the turns with the same `group`.   [B, K] -> [B, K]"""
    flat = returns.flatten()
    groups = Groups(group.flatten(), has_turn.flatten()[:, None])
    return (groups.normalised(flat) if std_norm else groups.deviation(flat)).view_as(returns)
