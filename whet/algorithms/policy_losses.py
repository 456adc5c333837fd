# SPDX-License-Identifier: Apache-2.0
"""Policy losses. Each returns the loss of every token [B, R], and per-token diagnostics, whose mean over the sampled
tokens is what is reported (as `actor/<name>`, under verl's names). How tokens are summed up is not a loss's to say; one
that is defined by its aggregation has it as a mark.

l is `log_probs`, o is `old_log_probs`, A is `advantages`, sg stops the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whet.algorithms.statistics import row_sums
from whet.registry import register_policy_loss

Loss = tuple[Tensor, dict[str, Tensor]]


@register_policy_loss("ppo_clip", aliases={"vanilla": {"clip_ratio_c": 3.0}})
def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = None,
) -> Loss:
    """max(-A rho, -A clamp(rho, 1 - low, 1 + high)) with rho = exp(clamp(l - o, -20, 20)).   -> [B, R]

    With a dual clip c > 1 the loss is at most -A c where A < 0: a token whose ratio has run away cannot rule the step.
    Schulman et al. 2017, https://arxiv.org/abs/1707.06347; dual clip: Ye et al. 2019, https://arxiv.org/abs/1912.09729;
    low and high apart: Yu et al. 2025 (DAPO), https://arxiv.org/abs/2503.14476.
    """
    log_ratio = (log_probs - old_log_probs).clamp(-20.0, 20.0)
    loss, clipped = _clipped_surrogate(log_ratio.exp(), advantages, clip_ratio_low, clip_ratio_high)
    diagnostics = {"ppo_kl": -log_ratio.detach(), "pg_clipfrac": clipped}
    if clip_ratio_c is not None:
        ceiling = -advantages * clip_ratio_c
        above = (advantages < 0) & (loss > ceiling)
        loss = torch.where(above, ceiling, loss)
        diagnostics["pg_clipfrac_lower"] = above.to(loss.dtype)
    return loss, diagnostics


@register_policy_loss("gspo", aggregation="seq-mean-token-mean")
def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float = 3e-4,
    clip_ratio_high: float = 4e-4,
) -> Loss:
    """PPO's clipped loss on the ratio of the whole sequence, s = exp(mean_t(l - o)), log s at most 10.   -> [B, R]

    ratio_t = sg(s) exp(l - sg(l)): s in value, while each token's gradient is its own, so that advantages may differ by
    token (GSPO-token); with one advantage a row the mean over tokens has the gradient of -A s.
    Zheng et al. 2025, https://arxiv.org/abs/2507.18071.
    """
    log_ratio = (log_probs - old_log_probs).detach()
    lengths = (response_mask != 0).sum(-1).clamp(min=1)
    sequence_ratio = (row_sums(log_ratio, response_mask) / lengths).clamp(max=10.0).exp()
    ratio = sequence_ratio[:, None] * (log_probs - log_probs.detach()).exp()
    loss, clipped = _clipped_surrogate(ratio, advantages, clip_ratio_low, clip_ratio_high)
    return loss, {"ppo_kl": -log_ratio, "pg_clipfrac": clipped}


@register_policy_loss("reinforce")
def reinforce(log_probs: Tensor, advantages: Tensor) -> Loss:
    """-A l: the plain policy gradient, right only for samples of the policy that is being updated.   -> [B, R]

    Williams 1992, https://doi.org/10.1007/BF00992696.
    """
    return -advantages * log_probs, {}


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """max(-A ratio, -A clamp(ratio, 1 - low, 1 + high)), and 1.0 where the clip is what counts."""
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    return torch.maximum(unclipped, clipped), (clipped > unclipped).to(ratio.dtype)
