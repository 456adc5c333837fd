# SPDX-License-Identifier: Apache-2.0
"""Steps of verl 0.9.1, EasyR1, ROLL and TRL 1.16 as slow formulas, from their keys: advantages, loss and gradient.

Each is written from the functions that its docstring names, with loops over rows and tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Keys = Mapping[str, Any]
Batch = Mapping[str, Tensor]
Step = tuple[Tensor, Tensor]  # advantages [B, R]; loss, differentiable in log_probs


def scores_of(batch: Batch) -> list[float]:
    return [float(row) for row in batch["token_level_scores"].sum(1)]


def groups(batch: Batch) -> list[list[int]]:
    uid = batch["uid"].tolist()
    return [[other for other in range(len(uid)) if uid[other] == uid[row]] for row in range(len(uid))]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def deviation(values: list[float]) -> float:
    return math.sqrt(sum((value - mean(values)) ** 2 for value in values) / (len(values) - 1))


def whitened(x: Tensor, mask: Tensor) -> Tensor:
    """verl's and ROLL's masked_whiten: the variance with n - 1, and 1e-8."""
    values = [float(each) for each in x[mask != 0]]
    return (x - mean(values)) / math.sqrt(deviation(values) ** 2 + 1e-8) * mask


def to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    returns = torch.zeros_like(rewards)
    for row in range(len(rewards)):
        running = 0.0
        for place in reversed(range(rewards.shape[1])):
            if mask[row, place]:
                running = float(rewards[row, place]) + gamma * running
                returns[row, place] = running
    return returns


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    advantages = torch.zeros_like(rewards)
    for row in range(len(rewards)):
        following, running = 0.0, 0.0
        for place in reversed(range(rewards.shape[1])):
            if mask[row, place]:
                delta = float(rewards[row, place]) + gamma * following - float(values[row, place])
                running = delta + gamma * lam * running
                following = float(values[row, place])
                advantages[row, place] = running
    return advantages


def by_row(values: list[float], mask: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None] * mask


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None) -> Tensor:
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    return loss if dual is None else torch.where(advantages < 0, torch.minimum(loss, -advantages * dual), loss)


def aggregated(mode: str, loss: Tensor, mask: Tensor, length: int) -> Tensor:
    rows = (loss * mask).sum(1)
    return {
        "token-mean": rows.sum() / mask.sum(),
        "seq-mean-token-sum": rows.mean(),
        "seq-mean-token-mean": (rows / mask.sum(1)).mean(),
        "seq-mean-token-sum-norm": rows.sum() / len(rows) / length,
    }[mode]


def penalty(form: str, log_probs: Tensor, other: Tensor) -> Tensor:
    apart = log_probs - other
    return {
        "kl": apart,
        "abs": apart.abs(),
        "mse": 0.5 * apart.square(),
        "low_var_kl": (-apart).exp() + apart - 1,
    }[form]


def verl(keys: Keys, batch: Batch) -> Step:
    """core_algos.py (estimators, compute_policy_loss_vanilla, _gspo, _gpg, agg_loss, kl_penalty), ray_trainer.py
    (apply_kl_penalty), the dapo reward manager's overlong buffer."""
    actor, mask = "actor_rollout_ref.actor.", batch["response_mask"]
    scores = scores_of(batch)
    buffer = {name: keys.get(f"custom_reward_function.overlong_buffer.{name}") for name in ("enable", "len")}
    if buffer["enable"]:
        start = keys["data.max_response_length"] - buffer["len"]
        factor = keys["custom_reward_function.overlong_buffer.penalty_factor"]
        lengths = batch["lengths"].tolist()
        scores = [
            score + min(-(length - start) / buffer["len"] * factor, 0)
            for score, length in zip(scores, lengths, strict=True)
        ]
    rewards = batch["last"] * torch.tensor(scores, dtype=torch.float64)[:, None]
    if keys.get("algorithm.use_kl_in_reward"):
        form, coef = keys.get("algorithm.kl_penalty", "kl"), keys.get("algorithm.kl_ctrl.kl_coef", 0.001)
        rewards = rewards - coef * penalty(form, batch["old_log_probs"], batch["ref_log_probs"]) * mask
    advantages = verl_advantages(keys.get("algorithm.adv_estimator", "gae"), keys, rewards, batch)
    low, high = keys.get(f"{actor}clip_ratio_low", 0.2), keys.get(f"{actor}clip_ratio_high", 0.2)
    moved = batch["log_probs"] - batch["old_log_probs"]
    mode = keys.get(f"{actor}loss_agg_mode", "token-mean")
    if keys.get(f"{actor}use_gpg_loss"):
        loss = -batch["log_probs"] * advantages
    elif keys.get(f"{actor}policy_loss.loss_mode", "vanilla") == "gspo":
        mode, row = "seq-mean-token-mean", (moved * mask).sum(1) / mask.sum(1)
        ratio = (row.detach()[:, None] + batch["log_probs"] - batch["log_probs"].detach()).exp()
        loss = clipped(ratio, advantages, low, high, None)
    else:
        loss = clipped(moved.exp(), advantages, low, high, keys.get(f"{actor}clip_ratio_c", 3.0))
    length = keys.get("data.max_response_length", 512)
    total = aggregated(mode, loss, mask, length)
    total = total - keys.get(f"{actor}entropy_coeff", 0) * aggregated(mode, batch["entropy"], mask, length)
    if keys.get(f"{actor}use_kl_loss"):
        form, coef = keys.get(f"{actor}kl_loss_type", "low_var_kl"), keys.get(f"{actor}kl_loss_coef", 0.001)
        distance = penalty(form, batch["log_probs"], batch["ref_log_probs"])
        total = total + coef * aggregated(mode, distance, mask, length)
    return advantages, total


def verl_advantages(name: str, keys: Keys, rewards: Tensor, batch: Batch) -> Tensor:
    mask, gamma = batch["response_mask"], keys.get("algorithm.gamma", 1.0)
    scores, members = [float(row) for row in rewards.sum(1)], groups(batch)
    if name == "gae":
        lam = keys.get("algorithm.lam", 1.0)
        return whitened(gae(rewards, batch["values"], mask, gamma, lam), mask)
    if name == "reinforce_plus_plus":
        return whitened(to_go(rewards, mask, gamma), mask)
    if name == "remax":
        return (to_go(rewards, mask, 1.0) - batch["reward_baselines"][:, None]) * mask
    found = []
    for row, group in enumerate(members):
        own = [scores[each] for each in group]
        if name == "grpo":
            found.append((scores[row] - mean(own)) / (deviation(own) + 1e-6))
        elif name == "rloo":
            found.append((scores[row] - mean(own)) * len(own) / (len(own) - 1))
        elif name == "gpg":
            found.append((scores[row] - mean(own)) * len(scores) / max(1, sum(score != 0 for score in scores)))
    return by_row(found, mask)


def easyr1(keys: Keys, batch: Batch) -> Step:
    """core_algos.py: compute_grpo_outcome_advantage, compute_policy_loss, compute_kl; defaults of its config."""
    mask, scores = batch["response_mask"], scores_of(batch)
    rows = []
    for row, group in enumerate(groups(batch)):
        own = [scores[each] for each in group]
        rows.append((scores[row] - mean(own)) / (deviation(own) + 1e-6))
    advantages = by_row(rows, mask)
    low, high = keys.get("worker.actor.clip_ratio_low", 0.2), keys.get("worker.actor.clip_ratio_high", 0.3)
    ratio = (batch["log_probs"] - batch["old_log_probs"]).exp()
    if keys.get("worker.actor.loss_type", "default") == "cispo":
        loss = -advantages * batch["log_probs"] * ratio.clamp(1 - low, 1 + high).detach()
    else:
        loss = clipped(ratio, advantages, low, high, keys.get("worker.actor.clip_ratio_dual", 3.0))
    mode = {"token": "token-mean", "seq": "seq-mean-token-mean"}[keys.get("worker.actor.loss_avg_mode", "token")]
    total = aggregated(mode, loss, mask, 1)
    if not keys.get("algorithm.disable_kl", False) and keys.get("algorithm.use_kl_loss", False):
        distance = penalty(keys.get("algorithm.kl_penalty", "kl"), batch["log_probs"], batch["ref_log_probs"])
        total = total + keys.get("algorithm.kl_coef", 1e-3) * aggregated(mode, distance, mask, 1)
    return advantages, total


def roll(keys: Keys, batch: Batch) -> Step:
    """functionals.py (reward_postprocess, reward_norm, compute_reinforce_return, compute_advantage), the loss_func of
    the RLVR actor worker."""
    mask, scores = batch["response_mask"], scores_of(batch)
    is_grpo = keys.get("adv_estimator", "gae") == "grpo"
    over = {name: "group" if is_grpo else keys.get(f"norm_{name}_type") for name in ("mean", "std")}
    found = []
    for row, group in enumerate(groups(batch)):
        members = {"group": [scores[each] for each in group], "batch": scores}
        centred = scores[row] - (mean(members[over["mean"]]) if over["mean"] else 0.0)
        found.append(centred / (deviation(members[over["std"]]) + 1e-6) if over["std"] else centred)
    bound = keys.get("reward_clip") or math.inf
    found = [max(-bound, min(bound, score)) for score in found]
    rewards = batch["last"] * torch.tensor(found, dtype=torch.float64)[:, None]
    advantages = to_go(rewards, mask, keys.get("gamma", 1.0))
    if keys.get("whiten_advantages"):
        advantages = whitened(advantages, mask)
    bound = keys.get("advantage_clip") or math.inf
    advantages = (advantages * mask).clamp(-bound, bound)
    clip = keys.get("pg_clip", 0.2)
    dual = 1 + 2 * clip if keys.get("dual_clip_loss") else None
    loss = clipped((batch["log_probs"] - batch["old_log_probs"]).exp(), advantages, clip, clip, dual)
    mode = keys.get("loss_agg_mode", "seq-mean-token-mean")
    total = aggregated(mode, loss, mask, keys.get("response_length", 1))
    if keys.get("use_kl_loss"):
        distance = penalty("low_var_kl", batch["log_probs"], batch["ref_log_probs"])
        total = total + keys["kl_loss_coef"] * aggregated(mode, distance, mask, 1)
    return advantages, total


def trl(keys: Keys, batch: Batch) -> Step:
    """GRPOTrainer: _generate_and_score_completions (scale_rewards), _compute_loss; the defaults of GRPOConfig.
    1.16 has no `mean` yet: the formula is that of the paper which maxrl.py names (arXiv 2602.02710), without an eps."""
    mask, scores, rows = batch["response_mask"], scores_of(batch), []
    for row, group in enumerate(groups(batch)):
        own = [scores[each] for each in group]
        if keys.get("scale_rewards", "group") == "mean":
            rows.append((scores[row] - mean(own)) / mean(own) if any(own) else 0.0)
        else:
            rows.append((scores[row] - mean(own)) / (deviation(own) + 1e-4))
    advantages = by_row(rows, mask)
    moved = batch["log_probs"] - batch["old_log_probs"]
    if keys.get("importance_sampling_level", "token") == "sequence":
        moved = ((moved * mask).sum(1) / mask.sum(1))[:, None]
    low = keys.get("epsilon", 0.2)
    loss = clipped(moved.exp(), advantages, low, keys.get("epsilon_high") or low, None)
    if keys.get("use_vllm"):  # sequence_mask with 3
        weight = ((batch["old_log_probs"] - batch["rollout_log_probs"]) * mask).sum(1, keepdim=True).exp()
        loss = loss * torch.where(weight > 3.0, 0.0, weight)
    mode = {"dapo": "token-mean", "grpo": "seq-mean-token-mean"}[keys.get("loss_type", "dapo")]
    return advantages, aggregated(mode, loss, mask, keys.get("max_completion_length", 512))


STEPS: Mapping[str, Callable[[Keys, Batch], Step]] = {"verl": verl, "easyr1": easyr1, "roll": roll, "trl": trl}
