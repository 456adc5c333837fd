# SPDX-License-Identifier: Apache-2.0
"""An aggregation of your own: whet train ... algorithm.loss_agg_mode=examples/extending/aggregation.py:root_length

After `*` it names the counts that it needs: num_tokens, num_sequences (both of the whole mini-batch), fixed_length.
"""

from torch import Tensor

from whet.algorithms.statistics import row_sums


def root_length(values: Tensor, response_mask: Tensor, *, num_sequences: Tensor) -> Tensor:
    """sum over rows of (sum_t x / sqrt(length)) / S: between the mean of a row's tokens and their sum."""
    lengths = response_mask.sum(-1).clamp(min=1)
    return (row_sums(values, response_mask) / lengths.sqrt()).sum() / num_sequences.clamp(min=1)
