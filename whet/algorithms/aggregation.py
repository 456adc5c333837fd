# SPDX-License-Identifier: Apache-2.0
"""Aggregations reduce a loss per token to one number. In the formulas x is the loss of a token, and m the mask.

N (`num_tokens`) and S (`num_sequences`) are the results of `counts`, summed over the global mini-batch, not over the
rows of one call, so that every split (micro-batches, packing, processes) adds up to the same loss and gradient. F is
`fixed_length`. Where a count is 0 the result is 0. A function gets only those of the three numbers that its signature
names after the `*`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from whet.algorithms.calls import Bound
from whet.algorithms.statistics import row_means, row_sums
from whet.registry import AGGREGATIONS, register_aggregation

Count = Tensor | int | float


def loss_mask(columns: Mapping[str, Tensor]) -> Tensor:
    """1 on the tokens to train on: sampled and not rejected.   [B, R]"""
    return columns.get("loss_mask", columns["response_mask"])


def counts(response_mask: Tensor) -> dict[str, Tensor]:
    """Counts `num_tokens` and `num_sequences` of these rows; a row without sampled tokens counts in neither."""
    lengths = response_mask.sum(-1)
    return {"num_tokens": lengths.sum(), "num_sequences": (lengths > 0).sum()}


def aggregate(mode: str, values: Tensor, response_mask: Tensor, **counts: Count) -> Tensor:
    """Applies the registered aggregation `mode` to `values` [B, R]. Masked values are ignored. `counts` has
    `num_tokens`, `num_sequences` and `fixed_length`.  Raises: RegistryError."""
    total: Tensor = _bound(mode)({"values": values, "response_mask": response_mask}, counts)
    return total


@cache
def _bound(mode: str) -> Bound:
    return Bound(AGGREGATIONS[mode], {})


@register_aggregation("token-mean")
def token_mean(values: Tensor, response_mask: Tensor, *, num_tokens: Count) -> Tensor:
    """sum(x m) / N: the mean over all N tokens, so long rows weigh more (DAPO, https://arxiv.org/abs/2503.14476)."""
    return _divide(row_sums(values, response_mask).sum(), num_tokens)


@register_aggregation("token-sum")
def token_sum(values: Tensor, response_mask: Tensor) -> Tensor:
    """sum(x m): the sum over all tokens, which grows with the mini-batch."""
    return row_sums(values, response_mask).sum()


@register_aggregation("seq-mean-token-sum", unbiased=True)
def seq_mean_token_sum(values: Tensor, response_mask: Tensor, *, num_sequences: Count) -> Tensor:
    """sum(x m) / S: the sum over a row's tokens, averaged over the S rows, as for the log-likelihood of sequences."""
    return _divide(row_sums(values, response_mask).sum(), num_sequences)


@register_aggregation("seq-mean-token-sum-norm")
def seq_mean_token_sum_norm(
    values: Tensor, response_mask: Tensor, *, num_sequences: Count, fixed_length: int
) -> Tensor:
    """sum(x m) / (S F): seq-mean-token-sum divided by `fixed_length` (Dr.GRPO, https://arxiv.org/abs/2503.20783)."""
    return _divide(row_sums(values, response_mask).sum(), num_sequences) / fixed_length


@register_aggregation("seq-mean-token-mean")
def seq_mean_token_mean(values: Tensor, response_mask: Tensor, *, num_sequences: Count) -> Tensor:
    """sum over rows of (sum_t x m / sum_t m) / S: rows have equal weight (GRPO, https://arxiv.org/abs/2402.03300)."""
    return _divide(row_means(values, response_mask).sum(), num_sequences)


def _divide(total: Tensor, count: Count) -> Tensor:
    """total / count; 0 / 0 is 0."""
    return total / torch.as_tensor(count).clamp(min=1)
