# SPDX-License-Identifier: Apache-2.0
"""AdamW and the learning rate as a function of the step."""

from __future__ import annotations

import math
from typing import Literal, Protocol

import torch
from torch import nn


class OptimSettings(Protocol):
    """The part of the config that an optimizer reads; see `OptimConfig`."""

    @property
    def lr(self) -> float: ...
    @property
    def betas(self) -> tuple[float, float]: ...
    @property
    def eps(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def schedule(self) -> Literal["constant", "linear", "cosine"]: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def min_lr_ratio(self) -> float: ...


def learning_rate(settings: OptimSettings, step: int, total_steps: int) -> float:
    """The rate of optimizer step `step` (from 0) of `total_steps`.

    Linear from lr / warmup_steps up to lr over the warm-up, then constant, or linearly or along half a cosine down to
    min_lr_ratio * lr at the last step.
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.lr
    done = min(1.0, (step - settings.warmup_steps) / max(1, total_steps - 1 - settings.warmup_steps))
    left = 1 - done if settings.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return settings.lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * left)


def adamw(model: nn.Module, settings: OptimSettings) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; biases, norms and other vectors are not decayed."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)
