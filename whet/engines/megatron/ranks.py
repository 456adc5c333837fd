# SPDX-License-Identifier: Apache-2.0
"""The process groups of a mesh. Megatron-Core keeps those of one mesh in globals; each engine has its own here."""

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
from whet.engines.megatron.core import model_parallel_cuda_manual_seed, on_device, parallel_state
from whet.engines.megatron.sizes import Sizes
from whet.errors import EngineError
from whet.models.sequence_parallel import TokenShare

BLANK = {name: value for name, value in vars(parallel_state).items() if name.startswith("_") and name.isupper()}


@dataclass(frozen=True)
class Ranks:
    """The groups of a mesh that this rank is in."""

    sizes: Sizes
    device: torch.device
    state: Mapping[str, Any]  # globals of Megatron-Core's parallel_state
    alone: dist.ProcessGroup | None  # of this rank, where tokens are split

    @contextmanager
    def used(self) -> Iterator[None]:
        """Around calls of Megatron-Core: its globals are those of this mesh."""
        before = {name: getattr(parallel_state, name) for name in self.state}
        vars(parallel_state).update(self.state)
        try:
            with on_device(self.device), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Megatron-Core warns of its own defaults
                yield
        finally:
            vars(parallel_state).update(before)

    @property
    def everyone(self) -> dist.ProcessGroup:
        """The group of all ranks."""
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    @property
    def tensor(self) -> dist.ProcessGroup:
        """Ranks with parts of the same layers."""
        return self._group("_TENSOR_MODEL_PARALLEL_GROUP")

    @property
    def pipeline(self) -> dist.ProcessGroup:
        """Ranks with different layers."""
        return self._group("_PIPELINE_MODEL_PARALLEL_GROUP")

    @property
    def context(self) -> dist.ProcessGroup:
        """Ranks with different tokens of the same rows."""
        return self._group("_CONTEXT_PARALLEL_GROUP")

    @property
    def token_share(self) -> TokenShare:
        """The split of tokens over the context ranks, which share out all heads."""
        assert self.alone is not None
        return TokenShare(self.context, self.context, self.alone)

    @property
    def rows(self) -> dist.ProcessGroup:
        """Ranks with different rows."""
        return self._group("_DATA_PARALLEL_GROUP")

    @property
    def expert(self) -> dist.ProcessGroup:
        """Ranks with different experts."""
        return self._group("_EXPERT_MODEL_PARALLEL_GROUP")

    @property
    def expert_tensor(self) -> dist.ProcessGroup:
        """Ranks with parts of the same experts."""
        return self._group("_EXPERT_TENSOR_PARALLEL_GROUP")

    def _group(self, name: str) -> dist.ProcessGroup:
        group: dist.ProcessGroup = self.state[name]
        return group


@cache  # the roles of a process share groups
def arrange(sizes: Sizes, device: torch.device) -> Ranks:
    """Makes the groups; on every rank."""
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
            alone = None
            if sizes.context > 1:
                alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
            return Ranks(sizes, device, {name: getattr(parallel_state, name) for name in BLANK}, alone)
    finally:
        vars(parallel_state).update(before)


def join(group: dist.ProcessGroup | None, device: torch.device) -> int:
    """Returns the number of ranks; a process on its own makes a group.  Raises: EngineError for a part of the ranks."""
    if not dist.is_initialized():
        dist.init_process_group(backends(device.type), store=dist.HashStore(), rank=0, world_size=1)
    if group is not None and group.size() != dist.get_world_size():
        found = f"trains on {group.size()} of {dist.get_world_size()} ranks"
        raise EngineError("megatron", found, "all ranks of a pool", "give the role a pool of its own")
    return dist.get_world_size()
