# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from torch import nn

from whet.config.schema import OptimConfig
from whet.engines.optim import adamw, learning_rate


def test_warmup_then_constant() -> None:
    settings = OptimConfig(lr=0.4, warmup_steps=4)
    assert [learning_rate(settings, step, 10) for step in range(6)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


def test_linear_ends_where_it_should() -> None:
    settings = OptimConfig(lr=1.0, schedule="linear", warmup_steps=1, min_lr_ratio=0.1)
    # steps 1..5 go from 1 to 0.1 in four equal parts
    assert [learning_rate(settings, step, 6) for step in range(6)] == pytest.approx([1, 1, 0.775, 0.55, 0.325, 0.1])


def test_cosine_is_half_way_in_the_middle() -> None:
    settings = OptimConfig(lr=2.0, schedule="cosine")
    assert [learning_rate(settings, step, 5) for step in (0, 2, 4, 9)] == pytest.approx([2.0, 1.0, 0.0, 0.0])


def test_only_matrices_decay() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    optimizer = adamw(model, OptimConfig(lr=1.0, weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.step()
    # without a gradient AdamW only decays: w -= lr * decay * w
    for old, new in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(new.detach(), old * (0.5 if old.dim() == 2 else 1.0))
