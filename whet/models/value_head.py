# SPDX-License-Identifier: Apache-2.0
"""Value models: the body of a language model with a linear head that gives one number for each state."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel


class ValueModel(nn.Module):
    """V(state) = head . hidden state. The head starts at 0: a new critic predicts 0 everywhere."""

    def __init__(self, body: PreTrainedModel) -> None:
        super().__init__()
        self.body = body
        self.value_head = nn.Linear(body.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def values(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, H] -> [N], in float32."""
        return self.value_head(hidden).squeeze(-1).float()


TrainedModel = PreTrainedModel | ValueModel
