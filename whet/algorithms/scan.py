# SPDX-License-Identifier: Apache-2.0
"""Backward recurrences over the sampled tokens of a row."""

from __future__ import annotations

import torch
from torch import Tensor

# Positions that are transposed together: a block of [1024, 256] floats stays in a CPU's cache during the loop.
BLOCK = 256


def reverse_scan(terms: Tensor, mask: Tensor, decay: float) -> Tensor:
    """y_t = terms_t + decay y_s at sampled positions, s the next sampled position; 0 elsewhere.   [B, R] -> [B, R]

    Text that the policy did not sample adds no discount, and its `terms` are ignored. The result has no gradient.
    """
    rows, positions = terms.shape
    result = torch.empty_like(terms, memory_format=torch.contiguous_format)
    carried = terms.new_zeros(rows)
    with torch.no_grad():
        for end in range(positions, 0, -BLOCK):
            block = slice(max(0, end - BLOCK), end)
            sampled = mask[:, block] != 0
            # One position of all rows must be contiguous: reading columns of [B, R] costs a cache miss per number.
            sums = terms[:, block].masked_fill(~sampled, 0.0).T.contiguous()  # [block, B]
            factors = torch.ones_like(terms[:, block]).masked_fill(sampled, decay).T.contiguous()  # [block, B]
            for total, factor in zip(reversed(sums.unbind(0)), reversed(factors.unbind(0)), strict=True):
                carried = total.addcmul_(factor, carried)
            result[:, block] = sums.T.masked_fill(~sampled, 0.0)
    return result


def next_sampled(x: Tensor, mask: Tensor) -> Tensor:
    """x at the row's next sampled position, 0 after the last, for each sampled position; 0 elsewhere.   [B, R]"""
    sampled, lengths = mask != 0, mask.sum(-1)
    following = x[sampled].roll(-1)
    following[lengths[lengths > 0].cumsum(0) - 1] = 0.0
    return torch.zeros_like(x).masked_scatter_(sampled, following)


def reward_to_go(token_level_rewards: Tensor, response_mask: Tensor, gamma: float = 1.0) -> Tensor:
    """R_t = r_t + gamma R_{t+1} over sampled tokens, 0 elsewhere.   [B, R] -> [B, R]"""
    return reverse_scan(token_level_rewards, response_mask, gamma)
