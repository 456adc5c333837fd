# SPDX-License-Identifier: Apache-2.0
"""Communication between pipeline stages (slices of a model's layers), for every engine with a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist


def run_forward(
    runs: Mapping[int, Callable[[torch.Tensor | None], dict[str, torch.Tensor]]],
    count: int,
    like: torch.Tensor,
    group: dist.ProcessGroup,
) -> dict[str, torch.Tensor]:
    """Runs the forward pass of a micro-batch through this rank's stages. `runs` has the stages by index, of `count` in
    the pipeline. Hidden states between stages have the shape of `like`.  Returns the last of these stages' outputs."""
    found: dict[str, torch.Tensor] = {}
    for index, run in runs.items():
        hidden = torch.empty_like(like) if index else None
        if hidden is not None:
            dist.recv(hidden, dist.get_global_rank(group, (index - 1) % group.size()), group)
        found = run(hidden)
        if index < count - 1:
            dist.send(found["states"].contiguous(), dist.get_global_rank(group, (index + 1) % group.size()), group)
    return found


def everywhere(
    own: Iterator[tuple[str, torch.Tensor]], group: dist.ProcessGroup, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the full weights of all pipeline stages on every rank: each rank in turn broadcasts its `own` weights."""
    rank = dist.get_rank(group)
    for stage in range(group.size()):
        source = dist.get_global_rank(group, stage)
        weights = own if stage == rank else iter(())
        while True:
            name, weight = next(weights, ("", None)) if stage == rank else ("", None)
            told: list[Any] = [None if weight is None else (name, weight.shape, weight.dtype)]
            dist.broadcast_object_list(told, source, group=group)
            if told[0] is None:
                break
            name, shape, dtype = told[0]
            whole = torch.empty(shape, dtype=dtype, device=device) if weight is None else weight.detach().contiguous()
            dist.broadcast(whole, source, group=group)
            yield name, whole
