# SPDX-License-Identifier: Apache-2.0
"""Communication between the stages of a pipeline, for every engine that has stages."""

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
    """Runs a micro-batch forward through this rank's stages: `runs`, of `count` in total. Hidden states, the output
    `states` of a stage before the last, have the shape of `like`.  Returns the outputs of the rank's last stage."""
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
    """Yields the full weights of all stages on every rank of a pipeline, one stage after another."""
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
            whole = torch.empty(shape, dtype=dtype, device=device) if weight is None else weight.contiguous()
            dist.broadcast(whole, source, group=group)
            yield name, whole
