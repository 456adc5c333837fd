# SPDX-License-Identifier: Apache-2.0
"""Activations that are computed twice: the same gradient, less memory; of the whole model and of an adapter."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

sys.path.insert(0, str(Path(__file__).parent))
import engine_conformance as suite

from whet.config.schema import EngineConfig, LoraConfig, OptimConfig
from whet.controller.worker import Placement
from whet.engines.role import RoleSettings
from whet.roles.workers import TrainWorker


def gradient(folder: Path, *, checkpointing: bool, packing: bool, lora: bool) -> tuple[torch.Tensor, int]:
    """Of one update, and the bytes of all tensors that its forward pass keeps for the backward pass."""
    settings = RoleSettings(
        model_path=str(folder),
        engine=EngineConfig(packing=packing),
        dtype="float32",
        optim=OptimConfig(lr=0.0),
        lora=LoraConfig(rank=4) if lora else None,
        gradient_checkpointing=checkpointing,
    )
    worker = TrainWorker(Placement("actor", 0, 1, None, {}), settings)
    if lora:  # B starts at 0, and A would have no gradient
        with torch.no_grad():
            for name, parameter in worker.engine.model.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.01)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    weights = {parameter.untyped_storage().data_ptr() for parameter in worker.engine.model.parameters()}
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        worker.update(suite.ragged_batch(), suite.OBJECTIVES[1])
    grads = [p.grad.flatten() for p in worker.engine.model.parameters() if p.grad is not None]
    return torch.cat(grads), sum(size for place, size in kept.items() if place not in weights)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("packing", [False, True])
def test_the_same_gradient_in_less_memory(model_folder: Path, packing: bool, lora: bool) -> None:
    plain, whole = gradient(model_folder, checkpointing=False, packing=packing, lora=lora)
    again, small = gradient(model_folder, checkpointing=True, packing=packing, lora=lora)
    assert plain.norm() > 0
    assert (again - plain).norm() <= 1e-7 * plain.norm()
    assert small < 0.5 * whole
