# SPDX-License-Identifier: Apache-2.0
"""The process groups of a mesh. Megatron-Core keeps one mesh in globals; here each engine has its own groups."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from whet.devices import backends
from whet.errors import EngineError
from whet.models.sequence_parallel import TokenShare
from whet.plugins.megatron.core import (
    ProcessGroupCollection,
    model_parallel_cuda_manual_seed,
    on_device,
    parallel_state,
)
from whet.plugins.megatron.sizes import Sizes

BLANK = {name: value for name, value in vars(parallel_state).items() if name.startswith("_") and name.isupper()}


@dataclass(frozen=True)
class MeshGroups:
    """The process groups of a mesh that this rank belongs to."""

    sizes: Sizes
    device: torch.device
    state: Mapping[str, Any]  # globals of Megatron-Core's parallel_state
    tensor: dist.ProcessGroup  # ranks with parts of the same layers
    pipeline: dist.ProcessGroup  # ranks with different layers
    rows: dist.ProcessGroup  # ranks with different rows
    expert: dist.ProcessGroup  # ranks with different experts
    expert_tensor: dist.ProcessGroup  # ranks with parts of the same experts
    context: TokenShare | None  # splits the tokens in attention, in which ranks share out all heads
    row: TokenShare | None  # splits the tokens after the layers, over the ranks of a stage that compute a row

    @contextmanager
    def used(self) -> Iterator[None]:
        """Sets Megatron-Core's globals to this mesh inside its block."""
        before = {name: getattr(parallel_state, name) for name in self.state}
        vars(parallel_state).update(self.state)
        try:
            with on_device(self.device), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Megatron-Core warns of its own defaults
                yield
        finally:
            vars(parallel_state).update(before)


@cache  # the roles of a process share groups
def arrange(sizes: Sizes, device: torch.device) -> MeshGroups:
    """Makes the process groups of a mesh; every rank must call it."""
    before = {name: getattr(parallel_state, name) for name in BLANK}
    vars(parallel_state).update({**BLANK, "_HYBRID_DP_CP_GROUPS": {}})
    try:
        with on_device(device):
            parallel_state.initialize_model_parallel(
                sizes.tensor,
                sizes.pipeline,
                sizes.virtual if sizes.virtual > 1 else None,
                context_parallel_size=sizes.context,
                expert_model_parallel_size=sizes.expert,
                expert_tensor_parallel_size=sizes.expert_tensor,
                create_gloo_process_groups=False,
            )
            model_parallel_cuda_manual_seed(1)  # nothing draws from it
            groups = ProcessGroupCollection.use_mpu_process_groups()
            state = {name: getattr(parallel_state, name) for name in BLANK}
            own = groups.tp, groups.pp, groups.dp, groups.ep, groups.expt_tp
            return MeshGroups(sizes, device, state, *own, _share(groups.cp), _share(groups.tp_cp))
    finally:
        vars(parallel_state).update(before)


def _share(group: dist.ProcessGroup) -> TokenShare | None:
    """Returns the split of tokens over a group; None for one rank. Attention on each rank still sees all tokens."""
    if group.size() == 1:
        return None
    return TokenShare(group, group, dist.new_group([dist.get_rank()], use_local_synchronization=True))


def join(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Starts torch.distributed for one process, if needed.  Raises: EngineError if `group` lacks some ranks."""
    if not dist.is_initialized():
        dist.init_process_group(backends(device.type), store=dist.HashStore(), rank=0, world_size=1)
    if group is not None and group.size() != dist.get_world_size():
        found = f"trains on {group.size()} of {dist.get_world_size()} ranks"
        raise EngineError("megatron", found, "all ranks of a pool", "give the role a pool of its own")
