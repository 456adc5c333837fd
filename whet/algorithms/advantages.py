# SPDX-License-Identifier: Apache-2.0
"""Advantage estimators. Each returns [B, R]; or [B] if it is constant over a row; or (advantages, returns).

s is the sum of a row's `token_level_rewards`, which are 0 on unsampled tokens; G its group, the n rows with its `uid`;
mu_G and sd_G the mean and sample (n - 1) standard deviation of s over G. A group of one has no signal: its advantage is
0. In distillation g is `teacher_log_probs`, the teacher's log-probs of the policy's responses, and o `old_log_probs`.
In trajectories of several turns r_k is the sum of `token_level_rewards` over the sampled tokens of turn k (`turn_ids`
[B, R] is the turn of each sampled token, -1 on other text), and G_k = r_k + gamma G_{k+1} the turn's discounted return.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from whet.algorithms.statistics import (
    Groups,
    alike,
    next_sampled,
    reverse_scan,
    reward_to_go,
    row_means,
    whiten as whitened,
)
from whet.errors import DataError
from whet.options import Cap, Finite, NonNegative, Positive, Share
from whet.registry import register_adv_est


@register_adv_est("gae")
def gae(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    gamma: Share = 1.0,
    lam: Share = 1.0,
    whiten: bool = True,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the sampled tokens, whitened; returns = L + V.   -> [B, R], [B, R]

        d_t = r_t + gamma V_next - V_t        L_t = d_t + gamma lam L_next        A = whiten(L), or L without `whiten`

    `next` is the next sampled token: text that the policy did not sample is skipped, and (V_next, L_next) is (0, 0)
    after the last sampled token, so that no value comes from padding.
    Schulman et al. 2015, https://arxiv.org/abs/1506.02438.
    """
    deltas = _deltas(token_level_rewards, values, response_mask, gamma)
    advantages = reverse_scan(deltas, response_mask, gamma * lam)
    return (whitened(advantages, response_mask) if whiten else advantages), advantages + values


@register_adv_est("vapo")
def vapo(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    gamma: Share = 1.0,
    lam_critic: Share = 1.0,
    lam_policy: Share | None = None,
    alpha: Positive = 0.05,
    whiten: bool = True,
) -> tuple[Tensor, Tensor]:
    """`gae` with one lambda for the critic and one for the policy, by default set by length.   -> A, returns [B, R]

        lam_policy = max(0, 1 - 1 / (alpha l))        A = whiten(L(lam_policy))        returns = L(lam_critic) + V

    L(lambda) is the estimate of `gae`, l the number of sampled tokens of the row: in a longer row a reward counts for
    more of the earlier tokens. Yue et al. 2025, https://arxiv.org/abs/2504.05118. A given `lam_policy` is the lambda of
    all rows: Yuan et al. 2025, https://arxiv.org/abs/2503.01491."""
    deltas = _deltas(token_level_rewards, values, response_mask, gamma)
    lengths = response_mask.sum(-1).clamp(min=1).to(deltas.dtype)
    by_length = (1.0 - 1.0 / (alpha * lengths)).clamp(min=0.0)
    advantages = reverse_scan(deltas, response_mask, gamma * (by_length if lam_policy is None else lam_policy))
    returns = reverse_scan(deltas, response_mask, gamma * lam_critic) + values
    return (whitened(advantages, response_mask) if whiten else advantages), returns


@register_adv_est("grpo")
def grpo(
    token_level_rewards: Tensor, response_mask: Tensor, uid: Tensor, *, std_norm: bool = True, eps: NonNegative = 1e-6
) -> Tensor:
    """A = (s - mu_G) / (sd_G + eps), or s - mu_G without `std_norm`.   -> [B]

    s is the score of a row, mu_G and sd_G are the mean and the standard deviation of s in the row's group G.
    Shao et al. 2024, https://arxiv.org/abs/2402.03300."""
    scores = token_level_rewards.sum(-1)
    groups = Groups(uid, response_mask)
    return groups.normalised(scores, eps) if std_norm else groups.deviation(scores)


@register_adv_est("dr_grpo", aggregation="seq-mean-token-sum-norm")
def dr_grpo(token_level_rewards: Tensor, response_mask: Tensor, uid: Tensor) -> Tensor:
    """A = s - mu_G: `grpo` without the division by sd_G, as this favours easy and hard prompts.   -> [B]

    The other half of Dr.GRPO is an aggregation that does not divide by a row's own length.
    Liu et al. 2025, https://arxiv.org/abs/2503.20783.
    """
    return grpo(token_level_rewards, response_mask, uid, std_norm=False)


@register_adv_est("rloo", unbiased=True)
def rloo(token_level_rewards: Tensor, response_mask: Tensor, uid: Tensor) -> Tensor:
    """A = n / (n - 1) (s - mu_G): the score minus the mean score of the other rows of G.   -> [B]

    Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740.
    """
    scores = token_level_rewards.sum(-1)
    groups = Groups(uid, response_mask)
    leave_one_out = groups.size / (groups.size - 1).clamp(min=1)
    return groups.deviation(scores) * leave_one_out.to(scores.dtype)


@register_adv_est("reinforce_plus_plus")
def reinforce_plus_plus(
    token_level_rewards: Tensor, response_mask: Tensor, *, gamma: Share = 1.0, whiten: bool = True
) -> tuple[Tensor, Tensor]:
    """R_t = r_t + gamma R_{t+1} over sampled tokens; A = whiten(R), or R without `whiten`.   -> A [B, R], R [B, R]

    No critic and no group: the baseline is the mean over all sampled tokens of the batch.
    Hu et al. 2025, https://arxiv.org/abs/2501.03262.
    """
    returns = reward_to_go(token_level_rewards, response_mask, gamma)
    return (whitened(returns, response_mask) if whiten else returns), returns


@register_adv_est("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(token_level_rewards: Tensor, response_mask: Tensor, uid: Tensor) -> Tensor:
    """A = whiten(s - mu_G): baseline mu_G of the group, deviation over all sampled tokens of the batch.   -> [B, R]

    Hu et al. 2025, https://arxiv.org/abs/2501.03262."""
    deviation = Groups(uid, response_mask).deviation(token_level_rewards.sum(-1))
    return whitened(deviation[:, None].expand(response_mask.shape), response_mask)


@register_adv_est("remax", unbiased=True)
def remax(token_level_rewards: Tensor, reward_baselines: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """A_t = R_t - b with R_t the undiscounted reward-to-go and b the score of the greedy response.   -> A, R [B, R]

    Li et al. 2023, https://arxiv.org/abs/2310.10505.
    """
    returns = reward_to_go(token_level_rewards, response_mask)
    return returns - reward_baselines[:, None], returns


@register_adv_est("opo")
def opo(token_level_rewards: Tensor, response_mask: Tensor, uid: Tensor) -> Tensor:
    """A = s - sum_G(len s) / sum_G(len): the baseline of least variance if gradients grow with the length.   -> [B]

    Hao et al. 2025, https://arxiv.org/abs/2505.23585."""
    scores, lengths = token_level_rewards.sum(-1), response_mask.sum(-1)
    groups = Groups(uid, response_mask)
    baseline = groups.sum(lengths * scores) / groups.sum(lengths).clamp(min=1)
    return (scores - baseline.to(scores.dtype)).masked_fill(groups.size < 2, 0.0)


@register_adv_est("gpg")
def gpg(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    uid: Tensor,
    *,
    count: Literal["informative", "nonzero"] = "informative",
) -> Tensor:
    """A = alpha (s - mu_G), alpha = B / B': groups without a signal do not make the step smaller.   -> [B]

    B is the number of rows. B' counts the rows in groups whose scores differ; with count="nonzero" the rows with a
    score other than 0, as in verl. Chu et al. 2025, https://arxiv.org/abs/2504.02546."""
    scores = token_level_rewards.sum(-1)
    groups, zero = Groups(uid, response_mask), scores.new_zeros(())
    counted = groups.differ(scores) if count == "informative" else ~alike(scores, zero) & groups.member
    return groups.deviation(scores) * groups.member.sum() / counted.sum().clamp(min=1)


@register_adv_est("max_rl")
def max_rl(token_level_rewards: Tensor, response_mask: Tensor, uid: Tensor) -> Tensor:
    """A = (s - mu_G) / mu_G, 0 where mu_G is 0: the gradient of the log of the pass rate, for scores >= 0.   -> [B]

    https://arxiv.org/abs/2602.02710.  Raises: DataError for a negative score, because mu_G is then no pass rate.
    """
    scores = token_level_rewards.sum(-1)
    if bool((scores < 0).any()):
        raise DataError("max_rl: scores", float(scores.min()), "scores >= 0, to divide by their mean", "shift rewards")
    groups = Groups(uid, response_mask)
    mean = groups.mean(scores)
    return (groups.deviation(scores) / mean).masked_fill(mean <= 0, 0.0)


@register_adv_est("lite_ppo")
def lite_ppo(token_level_rewards: Tensor, response_mask: Tensor, uid: Tensor, *, eps: NonNegative = 1e-6) -> Tensor:
    """A = (s - mu_G) / (sd + eps), sd the sample deviation of all scores of the batch.   -> [B]

    Liu et al. 2025, https://arxiv.org/abs/2508.08221.
    """
    scores = token_level_rewards.sum(-1)
    deviation, batch = Groups(uid, response_mask).deviation(scores), Groups(torch.zeros_like(uid), response_mask)
    return torch.where(deviation == 0, deviation, deviation / (batch.std(scores) + eps))


@register_adv_est("raft")
def raft(accuracy: Tensor) -> Tensor:
    """A = 1 for a correct response, 0 for a wrong one.   -> [B]

    With the loss `reinforce` this is RAFT, with `ppo_clip` RAFT++. Reinforce-Rej also drops groups that are all correct
    or all wrong (`algorithm.filter.name=dapo`). Xiong et al. 2025, https://arxiv.org/abs/2504.11343.
    """
    return (accuracy >= 1.0).to(accuracy.dtype)


@register_adv_est("grpo_passk")
def grpo_passk(token_level_rewards: Tensor, response_mask: Tensor, uid: Tensor, *, std_norm: bool = True) -> Tensor:
    """A = (s_max - s_second) / (sd_G + 1e-6) for the best row of a group, 0 for the others and for ties.   -> [B]

    s_max and s_second are the two highest scores. With this A, the update follows the gradient of E[max of n]: A is the
    best response's contribution to pass@n. https://arxiv.org/abs/2503.19595."""
    scores = token_level_rewards.sum(-1)
    groups = Groups(uid, response_mask)
    best = groups.max(scores)
    is_best = alike(scores, best) & groups.member
    alone = is_best & (groups.sum(is_best) == 1) & (groups.size > 1)
    second = groups.max(scores.masked_fill(is_best, -torch.inf))
    gap = torch.where(alone, scores - second, 0.0)
    return gap / (groups.std(scores) + 1e-6) if std_norm else gap


@register_adv_est("gdpo")
def gdpo(
    reward_parts: Tensor,
    response_mask: Tensor,
    uid: Tensor,
    *,
    weights: Sequence[Finite] | None = None,
    over: Literal["rows", "tokens"] = "rows",
) -> Tensor:
    """A = whiten(sum_k w_k (p_k - mu_G) / (sd_G + 1e-6)): each part of the reward is normalised by itself.   -> [B]

    p_k is column k of `reward_parts` [B, K], w_k its weight in `weights` (default 1). The sum is whitened over rows;
    with over="tokens", over sampled tokens (-> [B, R]). https://arxiv.org/abs/2601.05242."""
    groups = Groups(uid, response_mask)
    parts = reward_parts.unbind(1)
    advantage = reward_parts.new_zeros(len(reward_parts))
    for weight, part in zip(weights or [1.0] * len(parts), parts, strict=True):
        advantage = advantage + weight * groups.normalised(part)
    if over == "rows":
        return whitened(advantage[:, None], groups.member[:, None])[:, 0]
    return whitened(advantage[:, None].expand(response_mask.shape), response_mask)


@register_adv_est("optimal_token_baseline", aliases=("tir_optimal_token_baseline",))
def optimal_token_baseline(
    token_level_rewards: Tensor,
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    sum_pi_squared: Tensor,
    response_mask: Tensor,
    uid: Tensor,
    *,
    cap: Cap | None = None,
) -> tuple[Tensor, Tensor]:
    """A_t = R_t - B_t,  B_t = sum_G R_t W_t / (sum_G W_t + 1e-8),  W_t = sum_{k <= t} (1 - 2 pi_k + sum_v pi_v^2).

    W_t is the expected squared norm of the score function up to t, the weight of a token's return in the variance. With
    `cap` each term of W_t is multiplied by min(exp(old_log_probs - rollout_log_probs), cap)^2, for losses with such
    importance weights. Rows are compared at equal numbers of sampled tokens; text of tools does not count. B_t is 0 if
    no other row of the group has so many tokens. The baseline includes the row itself, so the estimate is biased.
    -> A, R [B, R].   https://arxiv.org/abs/2602.07078."""
    sampled = response_mask != 0
    returns = reward_to_go(token_level_rewards, response_mask)
    weights = 1 - 2 * old_log_probs.exp() + sum_pi_squared
    if cap is not None:
        weights = weights * (old_log_probs - rollout_log_probs).exp().clamp(max=cap).square()
    weights = weights.masked_fill(~sampled, 0.0).cumsum(-1) * sampled
    groups, place = Groups(uid, response_mask), (sampled.cumsum(-1) - 1).clamp(min=0)

    def total(x: Tensor) -> Tensor:
        """The sum of x over the k-th sampled tokens of a group's rows, at the k-th sampled token of each row."""
        compact = torch.zeros_like(x).scatter_add(1, place, x * sampled)
        return groups.sum(compact).gather(1, place)

    baseline = total(returns * weights) / (total(weights) + 1e-8)
    baseline = baseline.masked_fill(total(sampled.double()) < 2, 0.0)
    return (returns - baseline.to(returns.dtype)).masked_fill((groups.size < 2)[:, None], 0.0), returns


@register_adv_est("win_rate")
def win_rate(token_level_rewards: Tensor, response_mask: Tensor, uid: Tensor) -> Tensor:
    """A = p - 1/2: p is the fraction of other rows in G with a lower score, ties count half. For loss `sppo`.   -> [B]

    Wu et al. 2024, https://arxiv.org/abs/2405.00675."""
    scores = token_level_rewards.sum(-1)
    groups = Groups(uid, response_mask)
    draws = alike(scores[:, None], scores)
    wins = (~draws & (scores[:, None] > scores)).double() + 0.5 * draws.double()
    others = (uid[:, None] == uid) & groups.member & ~torch.eye(len(uid), dtype=torch.bool, device=uid.device)
    rate = (wins * others).sum(1) / others.sum(1).clamp(min=1)
    return torch.where(groups.member & (groups.size > 1), rate - 0.5, 0.0).to(scores.dtype)


@register_adv_est("best_worst")
def best_worst(token_level_rewards: Tensor, response_mask: Tensor, uid: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """A = 1 for the best row of a group, -1 for the worst, 0 for the others; all 0 if the scores are equal.   -> [B]

    If several rows tie as best or worst, the first is chosen. A preference loss compares the two chosen rows: online
    DPO, Guo et al. 2024, https://arxiv.org/abs/2402.04792."""
    scores = token_level_rewards.sum(-1)
    groups = Groups(uid, response_mask)
    differ, rows = groups.differ(scores), torch.arange(len(uid), device=uid.device).to(scores.dtype)

    def first_with(best: Tensor) -> Tensor:
        """Marks the first row of each group whose score is `best`."""
        at = alike(scores, best) & differ
        return at & (rows == -groups.max((-rows).masked_fill(~at, -torch.inf)))

    ends = first_with(groups.max(scores)).to(scores.dtype) - first_with(-groups.max(-scores)).to(scores.dtype)
    return ends, {"preference/tied_groups": _tied(groups, differ)}


@register_adv_est("all_pairs")
def all_pairs(token_level_rewards: Tensor, response_mask: Tensor, uid: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """A = 1 + the number of rows in the group with a lower score; all 0 if the scores are equal.   -> [B]

    A preference loss then compares all pairs of rows of the group, except rows with equal scores."""
    scores = token_level_rewards.sum(-1)
    groups = Groups(uid, response_mask)
    differ = groups.differ(scores)
    beats = (uid[:, None] == uid) & groups.member & (scores[:, None] > scores) & ~alike(scores[:, None], scores)
    return (1 + beats.sum(1)) * differ.to(scores.dtype), {"preference/tied_groups": _tied(groups, differ)}


def _tied(groups: Groups, differ: Tensor) -> Tensor:
    """Counts the groups whose scores are equal."""
    return ((~differ & groups.member) / groups.size.clamp(min=1)).sum()


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

    The others are the other rows of the group, s is a row's score, w_o `outcome_weight`, w_p `process_weight`, and
    q = beta (log pi_prm - log pi_ref) of a token: `process_rewards` times beta. The process reward model is the
    critic: critic.value_loss=implicit_reward trains it online. A group of one has no baseline: its advantage is 0.
    Cui et al. 2025, https://arxiv.org/abs/2502.01456."""
    groups = Groups(uid, response_mask)
    process_rewards = beta * process_rewards
    means = row_means(process_rewards, response_mask)
    others = (groups.sum(means) - means) / (groups.size - 1).clamp(min=1)
    process = reward_to_go(process_rewards - others[:, None].to(means.dtype), response_mask)
    outcome = rloo(token_level_rewards, response_mask, uid)
    advantages = outcome_weight * outcome[:, None] + process_weight * process
    return whitened(advantages.masked_fill((groups.size < 2)[:, None], 0.0), response_mask)


@register_adv_est("on_policy_distillation")
def on_policy_distillation(old_log_probs: Tensor, teacher_log_probs: Tensor, *, coef: Positive = 1.0) -> Tensor:
    """A = -coef (o - g), where o is `old_log_probs` and g `teacher_log_probs`.   -> [B, R]

    With the loss `reinforce` this is the policy gradient of each token's KL to the teacher. The teacher may be the
    policy itself with a hint in its prompt (self-distillation).
    Agarwal et al. 2023 (GKD), https://arxiv.org/abs/2306.13649."""
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
    """A = A_GRPO - coef (old_log_probs - teacher_log_probs): a reward and distillation from a teacher.   -> [B, R]"""
    base = grpo(token_level_rewards, response_mask, uid, std_norm=std_norm)[:, None]
    return base - coef * (old_log_probs - teacher_log_probs)


def _deltas(token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    """TD errors r_t + gamma V_next - V_t, with V_next the value of the next sampled token.   -> [B, R]"""
    return token_level_rewards + gamma * next_sampled(values, response_mask) - values


@register_adv_est("segment_reinforce", unbiased=True)
def segment_reinforce(
    token_level_rewards: Tensor, turn_ids: Tensor, response_mask: Tensor, *, gamma: Share = 1.0
) -> Tensor:
    """A_t = G_k, the discounted return of the turn k that sampled token t.   -> [B, R]

    gamma discounts once per turn. ROLL's "agentic_reinforce"."""
    returns, _ = turn_returns(token_level_rewards, turn_ids, response_mask, gamma)
    return to_tokens(returns, turn_ids, response_mask)


@register_adv_est("step_reinforce")
def step_reinforce(
    token_level_rewards: Tensor, turn_ids: Tensor, response_mask: Tensor, uid: Tensor, *, gamma: Share = 1.0
) -> Tensor:
    """A_t = (G_k - mean) / (sd + 1e-6), mean and deviation over all turns of all rows of the group.   -> [B, R]

    G_k is the discounted return of the turn k that sampled token t. ROLL's "step_reinforce".
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

    s is a row's score, G_k the discounted return of turn k, norm(x) = (x - mean) / (sd + 1e-6), without the division if
    not `std_norm`. `state_hash` [B, R] identifies the state in which a turn was sampled, the same number on all its
    tokens; the second term is 0 for a state that occurs once. Feng et al. 2025, https://arxiv.org/abs/2505.10978.
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
    """Computes the discounted returns G_k [B, K] of K turns, and a mask [B, K] of the turns that a row has."""
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
