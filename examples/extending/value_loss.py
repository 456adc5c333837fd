# SPDX-License-Identifier: Apache-2.0
"""A value loss of your own: whet train ... critic.value_loss=examples/extending/value_loss.py:huber"""

import torch.nn.functional as F
from torch import Tensor


def huber(values: Tensor, returns: Tensor, *, delta: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    """(v - R)^2 / 2 near the return and delta (|v - R| - delta / 2) beyond delta.   -> [B, R], diagnostics per token"""
    losses = F.huber_loss(values, returns, reduction="none", delta=delta)
    return losses, {"far": ((values - returns).abs() > delta).float()}
