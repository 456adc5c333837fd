# SPDX-License-Identifier: Apache-2.0
"""A rule that excludes tokens: whet train ... algorithm.correction.rejection=examples/extending/rejection.py:likely"""

import math

from torch import Tensor


def likely(rollout_log_probs: Tensor, *, least: float = 1e-4) -> Tensor:
    """True, which is trained on, where the token's probability was at least `least` when sampled.   -> [B, R] bool"""
    return rollout_log_probs >= math.log(least)
