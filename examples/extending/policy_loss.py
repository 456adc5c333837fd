# SPDX-License-Identifier: Apache-2.0
"""A policy loss of your own: whet train ... algorithm.policy_loss=examples/extending/policy_loss.py:bounded

It returns the loss of every token [B, R]; `algorithm.loss_agg_mode` aggregates them.
"""

import torch
from torch import Tensor


def bounded(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, bound: float = 0.2
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A b tanh((l - o) / b): a log-ratio that saturates at the bound b on both sides.   -> [B, R], and diagnostics per
    token"""
    moved = log_probs - old_log_probs
    return -advantages * bound * torch.tanh(moved / bound), {"saturated": (moved.abs() > bound).float()}
