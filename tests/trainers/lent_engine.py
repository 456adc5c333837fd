# SPDX-License-Identifier: Apache-2.0
"""A rollout engine on the devices of several ranks, as a server has them, which notes when it has them; and training
ranks that note when they have theirs. In a module that worker processes import."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from whet.config.schema import ModelConfig
from whet.controller.dispatch import register
from whet.models.load import load_policy
from whet.roles.rollout_worker import RolloutWorker
from whet.roles.workers import TrainWorker
from whet.rollout.native.engine import NativeEngine
from whet.rollout.protocol import Span, Weights

SECONDS = 0.2  # that moving off a device takes


def note(folder: str, line: str) -> None:
    """Adds a line to the notes of all processes."""
    with Path(folder, "notes").open("a") as file:
        file.write(f"{line}\n")


class Together:
    """The native engine with weights of its own, like a server; its methods are the engine's."""

    def __init__(
        self,
        dtype: torch.dtype,
        num_devices: int,
        model: ModelConfig,
        span: Span | None = None,
        *,
        folder: str,
        tensor_parallel_size: int = 1,
        weights_dir: str | None = None,
        weight_transfer: str = "file",
        restarts: int = 0,
    ) -> None:
        self.span = span
        self._engine, self._folder, self.devices = NativeEngine(dtype=dtype), folder, num_devices
        module: Any = load_policy(str(model.path))
        self._engine.attach(module.requires_grad_(False), 0, is_own=True)
        note(folder, f"begins on {num_devices} devices")

    def __getattr__(self, name: str) -> Any:
        if name in ("attach", "adopt"):  # it shares no module
            raise AttributeError(name)
        return getattr(self._engine, name)

    def load(self, weights: Weights, version: int) -> None:
        """Fills the engine's own module."""
        self._engine.load(weights, version)

    def sleep(self) -> None:
        """Leaves the devices."""
        note(self._folder, "sleeps")
        time.sleep(SECONDS)
        note(self._folder, "slept")

    def wake(self) -> None:
        """Takes the devices."""
        note(self._folder, "wakes")


class Noting(TrainWorker):
    """A training rank that takes its time."""

    @register()
    def note_in(self, folder: str) -> None:
        """Notes moves from now on."""
        engine: Any = self.engine

        def offload(weights: bool = True) -> None:
            time.sleep(SECONDS * self.rank)
            note(folder, "left")

        engine.offload, engine.onload = offload, lambda: note(folder, "back")

    @register()
    def change(self) -> None:
        """An update of all weights."""
        engine: Any = self.engine
        with torch.no_grad():
            for weight in engine.model.parameters():
                weight.mul_(1.25)


class Looking(RolloutWorker):
    """Records the devices that it sees."""

    @register()
    def visible(self) -> str | None:
        """The devices that a process of this rank would see."""
        return os.environ.get("CUDA_VISIBLE_DEVICES")
