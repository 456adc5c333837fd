# SPDX-License-Identifier: Apache-2.0
"""A policy loss of your own: whet train ... algorithm.policy_loss=examples/algorithms/loss.py:bounded

It gives the loss of every token [B, R]; how tokens are summed up is `algorithm.loss_agg_mode`.
"""

import torch
from torch import Tensor


def bounded(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, bound: float = 0.2
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A tanh(l - o within the bound): a ratio that saturates on both sides.   -> [B, R], and diagnostics per token"""
    moved = log_probs - old_log_probs
    return -advantages * bound * torch.tanh(moved / bound), {"saturated": (moved.abs() > bound).float()}
