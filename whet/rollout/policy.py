# SPDX-License-Identifier: Apache-2.0
"""The module that a rollout engine samples from, and which weights are in it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from transformers import PreTrainedModel

from whet.errors import EngineError, WeightSyncError


class Policy:
    """The module that is sampled from: none yet, another's, or the engine's own, which it fills and may offload."""

    def __init__(self) -> None:
        self.module: PreTrainedModel | None = None
        self.version = -1
        self._is_own = False
        self._coming: int | None = None  # the version that is being filled in, or was when it broke off
        self._device: torch.device | None = None  # where it belongs, while it is away

    def set(self, module: PreTrainedModel, version: int, *, is_own: bool) -> None:
        """Samples from `module` from now on."""
        self.module, self.version, self._is_own = module, version, is_own
        self._coming = self._device = None

    def fill(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Copies all weights into the module.  Raises: WeightSyncError; whatever `weights` raises."""
        module = self.require()
        self._coming = version
        _fill(module, weights)
        self.version, self._coming = version, None

    def require(self) -> PreTrainedModel:
        """The module.  Raises: EngineError where there is none."""
        if self.module is None:
            raise EngineError("the rollout engine has no weights yet: attach a module, or adopt one and load weights")
        return self.module

    def require_whole(self) -> PreTrainedModel:
        """The module, to sample from.  Raises: also WeightSyncError where its weights are of two versions."""
        if self._coming is not None:
            raise WeightSyncError(
                f"version {self._coming} of the weights did not arrive whole, and what is left of version "
                f"{self.version} is mixed with it; nothing is sampled until all weights of a version came"
            )
        return self.require()

    def leave_device(self) -> None:
        """Moves an own module to the host's memory."""
        if self._is_own and self._device is None:
            self._device = self.require().device
            nn.Module.to(self.require(), "cpu")

    def return_to_device(self) -> None:
        """Undoes `leave_device`."""
        if self._device is not None:
            nn.Module.to(self.require(), self._device)
            self._device = None


@torch.no_grad()
def _fill(module: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    own = dict(module.named_parameters())
    left = dict.fromkeys(own)
    for name, weight in weights:
        if name not in own or own[name].shape != weight.shape:
            has = f"{name} of {list(own[name].shape)}" if name in own else f"no {name}"
            raise WeightSyncError(
                f"{name} of {list(weight.shape)} came for a rollout whose model has {has}: trainer and rollout were "
                "built from different models; let both load model.path"
            )
        own[name].copy_(weight)
        left.pop(name, None)
    if left:
        raise WeightSyncError(
            f"{len(left)} of {len(own)} weights did not come, such as {next(iter(left))}: the training engine did not "
            "name all weights of the model"
        )
