# SPDX-License-Identifier: Apache-2.0
"""A token weight of your own: whet train ... algorithm.correction.weight=examples/extending/token_weight.py:late

The mini-batch is whole here; no gradient passes through a weight."""

from torch import Tensor


def late(response_mask: Tensor, *, decay: float = 0.9) -> Tensor:
    """decay ^ (sampled tokens of the row that come after): the end of a response counts most.   -> [B, R]"""
    after = response_mask.sum(-1, keepdim=True) - response_mask.cumsum(-1)
    return decay**after
