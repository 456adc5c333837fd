# SPDX-License-Identifier: Apache-2.0
"""Reward shaping: what is added to a row's score before the estimator, and where a row's score is paid."""

from __future__ import annotations

import torch
from torch import Tensor

from whet.registry import register_shaping


@register_shaping("soft_overlong")
def soft_overlong(
    response_lengths: Tensor, *, max_response_length: int, buffer_length: int, penalty: float = 1.0
) -> Tensor:
    """min(-(len - (L_max - L_buf)) / L_buf * penalty, 0), to be added to the score.   [B] tokens -> [B]

    A ramp over the last L_buf = `buffer_length` tokens, from 0 down to -penalty at L_max = `max_response_length`.

    Yu et al. 2025 (DAPO), https://arxiv.org/abs/2503.14476.
    """
    excess = response_lengths - (max_response_length - buffer_length)
    return (-excess / buffer_length * penalty).clamp(max=0.0)


def pay_on_last_token(scores: Tensor, response_mask: Tensor) -> Tensor:
    """A row's score on its last sampled token; a row without sampled tokens is paid nothing.   [B] -> [B, R]"""
    sampled = response_mask != 0
    after = sampled.flip(-1).cumsum(-1).flip(-1)  # sampled tokens at or after t
    return torch.where(sampled & (after == 1), scores[:, None], 0.0)
