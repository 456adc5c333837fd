# SPDX-License-Identifier: Apache-2.0
"""Losses of preferences between two responses to one prompt."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor, *, center_coef: float = 0.0) -> Tensor:
    """-log sigmoid(chosen - rejected - margin) + center_coef (chosen + rejected)^2, of scores of pairs.   [n] -> [n]

    Bradley & Terry 1952, as in Ouyang et al. 2022, https://arxiv.org/abs/2203.02155; margin: Touvron et al. 2023 (Llama
    2), https://arxiv.org/abs/2307.09288; center_coef: Eisenstein et al. 2023, https://arxiv.org/abs/2312.09244.
    """
    loss = -F.logsigmoid(chosen - rejected - margin)
    return loss + center_coef * (chosen + rejected).square() if center_coef else loss
