# SPDX-License-Identifier: Apache-2.0
"""Sums, means and deviations over sampled tokens and over groups of rows; backward recurrences along a row.

Totals are accumulated in float64, so that equal float32 numbers have exactly their own value as mean and exactly 0 as
deviation. A rounding error divided by a deviation of 1e-8 would look like a signal. Therefore, if the scores of a group
are equal except for rounding (`whet.rounding`), each score counts as its own mean, and the deviation is 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from whet.rounding import ABSOLUTE, RELATIVE

# Positions that are transposed together: a block of [1024, 256] floats stays in a CPU's cache during the loop.
BLOCK = 256
CACHED = 2**19  # numbers in a block that fits into a CPU's cache


def row_blocks(x: Tensor) -> list[slice]:
    """Splits rows into slices. On a CPU a slice fits into the cache; elsewhere one slice has all rows."""
    rows = len(x) if x.device.type != "cpu" else max(1, CACHED * len(x) // max(1, x.numel()))
    return [slice(start, start + rows) for start in range(0, len(x), max(1, rows))]


def zero_outside(column: Tensor, mask: Tensor) -> Tensor:
    """Returns `column` with 0 where `mask` is 0; on a CPU without a copy if nothing changes.   [B, R, ...], [B, R]"""
    mask = mask.reshape(*mask.shape, *[1] * (column.dim() - mask.dim()))
    if column.device.type == "cpu":  # on an accelerator the host would wait for the result of the test
        values = column.detach()
        outside = ((values[rows] != 0) & (mask[rows] == 0) for rows in row_blocks(values))
        # A maximum of bytes is many times faster than torch's own `any`.
        if not any(flags.numel() and bool(flags.byte().amax()) for flags in outside):
            return column
    return column.masked_fill(mask == 0, 0.0)


def row_sums(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of each row over the positions where `mask` is not 0; differentiable once.   [B, R] -> [B]"""
    sums: Tensor = _RowSums.apply(x, mask)  # type: ignore[no-untyped-call]
    return sums


def row_means(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of each row over the positions where `mask` is not 0; 0 for a row without any.   [B, R] -> [B]"""
    return row_sums(x, mask) / mask.sum(-1).clamp(min=1)


def segment_means(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over each run of neighbouring positions where `mask` is not 0, at all positions of the run; 0 elsewhere.
    Differentiable.   [B, R] -> [B, R]"""
    sampled = mask != 0
    starts = sampled & ~torch.nn.functional.pad(sampled, (1, 0))[:, :-1]
    segment = starts.cumsum(-1)  # 0 before the first
    totals = x.new_zeros(len(x), x.shape[1] + 1).scatter_add(1, segment, x.masked_fill(~sampled, 0.0))
    lengths = x.new_zeros(len(x), x.shape[1] + 1).scatter_add(1, segment, sampled.to(x.dtype))
    return (totals / lengths.clamp(min=1)).gather(1, segment).masked_fill(~sampled, 0.0)


def log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """log_probs - old_log_probs, clamped to [-20, 20], because exp of a larger value may overflow."""
    return (log_probs - old_log_probs).clamp(-20.0, 20.0)


def alike(x: Tensor, y: Tensor) -> Tensor:
    """Tells, elementwise, whether two scores are equal except for rounding."""
    return torch.isclose(x, y, rtol=RELATIVE, atol=ABSOLUTE)


def pick(condition: Tensor, one: float, other: float, like: Tensor) -> Tensor:
    """`one` where the condition holds, else `other`, in the dtype of `like` (torch.where would return float32)."""
    return torch.where(condition, like.new_tensor(one), like.new_tensor(other))


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of x (of flags their fraction) over the positions where `mask` is not 0; 0 if there is none.   -> scalar"""
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for rows in row_blocks(x):
        total = total + x[rows].masked_fill(mask[rows] == 0, 0).sum(dtype=torch.float64)
    mean = total / mask.sum().clamp(min=1)
    return mean.to(x.dtype) if x.is_floating_point() else mean.float()


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over the N positions where `mask` is not 0, var with N - 1; 0 elsewhere, and
    everywhere if N < 2.   [B, R] -> [B, R]"""
    mean, squares = masked_mean(x, mask), torch.zeros((), dtype=torch.float64, device=x.device)
    whitened = torch.empty_like(x, memory_format=torch.contiguous_format)
    for rows in row_blocks(x):
        deviation = torch.sub(x[rows], mean, out=whitened[rows]).masked_fill_(mask[rows] == 0, 0.0)
        squares = squares + deviation.square().sum(dtype=torch.float64)
    variance = squares / (mask.sum() - 1).clamp(min=1)
    return whitened.div_((variance + 1e-8).sqrt().to(x.dtype))


class _RowSums(torch.autograd.Function):
    """Computes x.masked_fill(mask == 0, 0).sum(-1) without a copy of x, in the forward and in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        sums = x.new_empty(len(x))
        for rows in row_blocks(x):
            sums[rows] = x[rows].masked_fill(mask[rows] == 0, 0.0).sum(-1)
        return sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (mask,), (grad,) = ctx.saved_tensors, grads
        result: Tensor = torch.empty(mask.shape, dtype=grad.dtype, device=grad.device)
        zero = grad.new_zeros(())
        for rows in row_blocks(result):
            torch.where(mask[rows] != 0, grad[rows, None], zero, out=result[rows])
        return result, None


def spread(x: Tensor, mask: Tensor) -> Tensor:
    """Copies each row's number, which must be finite, to its sampled tokens.   [B], [B, R] of 0 and 1 -> [B, R]"""
    result: Tensor = torch.empty(mask.shape, dtype=x.dtype, device=x.device)
    for rows in row_blocks(result):
        torch.mul(x[rows, None], mask[rows], out=result[rows])
    return result


class Groups:
    """Groups of rows with the same `uid`: sums, means and deviations over each group, one value per row.

    A row without sampled tokens (failed, dropped) is a member of no group: it counts in no sum or size, and its own
    deviation is 0.
    """

    def __init__(self, uid: Tensor, response_mask: Tensor) -> None:
        self.member = response_mask.sum(-1) > 0  # [B]
        names, self._group = torch.unique(uid, return_inverse=True)  # [G], [B]
        self._num_groups = len(names)
        self.size = self.sum(torch.ones_like(uid))  # [B]: members of the row's group

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x over the members of each row's group, in float64.   [B, ...] -> [B, ...]"""
        totals = x.new_zeros((self._num_groups, *x.shape[1:]), dtype=torch.float64)
        totals.index_add_(0, self._group[self.member], x[self.member].double())
        return totals[self._group]

    def mean(self, x: Tensor) -> Tensor:
        """The mean of x over the members of each row's group; x itself if they are equal except for rounding.
        [B] -> [B]"""
        return self._mean(x).to(x.dtype)

    def max(self, x: Tensor) -> Tensor:
        """The largest x of the members of each row's group; -inf for a group without members.   [B] -> [B]"""
        largest = x.new_full((self._num_groups,), -torch.inf)
        largest.scatter_reduce_(0, self._group[self.member], x[self.member], "amax")
        return largest[self._group]

    def differ(self, x: Tensor) -> Tensor:
        """True where x differs within a row's group by more than rounding; False for a row that is no member.
        [B] -> [B] bool"""
        return ~alike(self.max(x), -self.max(-x)) & self.member

    def deviation(self, x: Tensor) -> Tensor:
        """x - mean of its group; 0 in a group of one.   [B] -> [B]"""
        return (x - self._mean(x)).masked_fill(~self.member, 0.0).to(x.dtype)

    def std(self, x: Tensor) -> Tensor:
        """The sample (n - 1) standard deviation of each row's group; 0 in a group of one.   [B] -> [B]"""
        squares = self.sum(self.deviation(x).square())
        return (squares / (self.size - 1).clamp(min=1)).sqrt().to(x.dtype)

    def normalised(self, x: Tensor, eps: float = 1e-6) -> Tensor:
        """(x - mean) / (std + eps) of each row's group; 0 where the deviation is 0, with any eps.   [B] -> [B]"""
        deviation = self.deviation(x)
        return torch.where(deviation == 0, deviation, deviation / (self.std(x) + eps))

    def _mean(self, x: Tensor) -> Tensor:
        mean = self.sum(x) / self.size.clamp(min=1)
        return torch.where(self.differ(x) | ~self.member, mean, x.double())


def reverse_scan(terms: Tensor, mask: Tensor, decay: float | Tensor) -> Tensor:
    """y_t = terms_t + decay y_s at sampled positions, s the next sampled position; 0 elsewhere.   [B, R] -> [B, R]

    `decay` is one number, or one for each row [B].

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
            ones = torch.ones_like(terms[:, block])
            if isinstance(decay, Tensor):
                factors = torch.where(sampled, decay[:, None], ones).T.contiguous()
            else:
                factors = ones.masked_fill(sampled, decay).T.contiguous()  # [block, B]
            for total, factor in zip(reversed(sums.unbind(0)), reversed(factors.unbind(0)), strict=True):
                carried = total.addcmul_(factor, carried)
            result[:, block] = sums.T.masked_fill(~sampled, 0.0)
    return result


def next_sampled(x: Tensor, mask: Tensor) -> Tensor:
    """Returns at each sampled position x of the next one in the row; 0 at the last one and elsewhere.   [B, R]"""
    sampled, lengths = mask != 0, mask.sum(-1)
    following = x[sampled].roll(-1)
    following[lengths[lengths > 0].cumsum(0) - 1] = 0.0
    return torch.zeros_like(x).masked_scatter_(sampled, following)


def reward_to_go(token_level_rewards: Tensor, response_mask: Tensor, gamma: float = 1.0) -> Tensor:
    """R_t = r_t + gamma R_{t+1} over sampled tokens, 0 elsewhere.   [B, R] -> [B, R]"""
    return reverse_scan(token_level_rewards, response_mask, gamma)
