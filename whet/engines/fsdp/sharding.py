# SPDX-License-Identifier: Apache-2.0
"""A model's modules given to torch: layers one by one, their heads split over ranks first where that is asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from whet import devices
from whet.engines.fsdp.ranks import Ranks
from whet.engines.fsdp.tensor_parallel import split_heads
from whet.models.load import body_of, layers
from whet.models.outputs import ForwardSettings, outputs_of
from whet.models.packing import Layout


class Whole(nn.Module):
    """A forward pass from rows to outputs as one module, before which torch gathers the weights outside layers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, where: Layout, needs: frozenset[str], settings: ForwardSettings, temperature: float
    ) -> dict[str, torch.Tensor]:
        """`outputs_of`, each in memory of its own: torch hangs its hooks on what comes out."""
        outputs = outputs_of(self.model, where, needs, settings, temperature)
        return {name: value.clone() for name, value in outputs.items()}


def shard(model: nn.Module, ranks: Ranks, *, is_narrow: bool, reshard_after_forward: bool, cpu_offload: bool) -> Whole:
    """The model in shards over `ranks`; its modules stay where they are."""
    body = body_of(model)
    if ranks.tensor_mesh is not None:
        split_heads(body, ranks.tensor_mesh)
    options: dict[str, Any] = {
        "mesh": ranks.shard_mesh,
        # States between layers keep their dtype: autocast narrows what products read, as it does in one process.
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if is_narrow else None,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=devices.count() > 0) if cpu_offload else OffloadPolicy(),
    }
    whole = Whole(model)
    embedding = body.get_input_embeddings()
    head = model.get_output_embeddings() if model is body else None  # type: ignore[operator]
    if head is None or head.weight is not embedding.weight:
        fully_shard(embedding, reshard_after_forward=reshard_after_forward, **options)
    for layer in layers(body):
        fully_shard(layer, reshard_after_forward=reshard_after_forward, **options)
    fully_shard(whole, **options)
    for module in whole.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # losses are divided by counts of all ranks
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other factor
            module.set_reduce_scatter_unused_params(True)
    return whole
