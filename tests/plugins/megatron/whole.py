# SPDX-License-Identifier: Apache-2.0
"""A worker with the gradients of all ranks, and a stand-in for TransformerEngine's attention: in a module that worker
processes import."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2] / "engines"))
import engine_conformance as suite

from whet.batch import Batch
from whet.controller.dispatch import register
from whet.models.sequence_parallel import TokenShare
from whet.plugins.megatron import core


class Attention(torch.nn.Module):
    """Causal attention of rows whose tokens lie on ranks as `thd_get_partitioned_indices` of TransformerEngine says:
    of a row in 2 n chunks, rank r of n has chunk r and chunk 2 n - 1 - r."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()
        group = core.parallel_state.get_context_parallel_group()
        assert config.context_parallel_size == group.size() > 1
        self.share = TokenShare(group, group, group)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None, kind: Any, packed_seq_params: Any
    ) -> torch.Tensor:
        """[T, H, D], [T, KV, D], [T, KV, D] of this rank's tokens -> [T, H D]."""
        assert (kind.name, packed_seq_params.qkv_format) == ("padding_causal", "thd")
        begins, size = packed_seq_params.cu_seqlens_q_padded.tolist(), self.share.size
        rows = [torch.arange(start, stop).view(2 * size, -1) for start, stop in pairwise(begins) if stop > start]
        owned = [torch.cat([row[[rank, 2 * size - 1 - rank]].flatten() for row in rows]) for rank in range(size)]
        assert packed_seq_params.max_seqlen_q == max(stop - start for start, stop in pairwise(begins))
        whole = [self.share.gather_rings(x)[torch.cat(owned).argsort()].transpose(0, 1) for x in (query, key, value)]
        outs = [
            F.scaled_dot_product_attention(*(x[:, start:stop] for x in whole), is_causal=True, enable_gqa=True)
            for start, stop in pairwise(begins)
            if stop > start
        ]
        return torch.cat(outs, 1).transpose(0, 1)[owned[self.share.rank]].flatten(1)


class Whole(suite.Probe):
    """A worker of the engine with TransformerEngine's stand-in in its place."""

    def __init__(self, *given: Any) -> None:
        core.transformer_engine = SimpleNamespace(TEDotProductAttention=Attention)
        super().__init__(*given)

    @register()
    def gradients(self, batch: Batch) -> dict[str, torch.Tensor] | None:
        """Gradients of a mini-batch, of which each rank takes its rows, whole, by name; from rank 0."""
        engine: Any = self.engine
        rows = batch[list(range(engine.dp_rank, len(batch), engine.dp_size))]
        engine.forward_backward(rows, suite.OBJECTIVES[1])
        with engine.ranks.used():
            engine._sum_gradients()
        for each in engine.wrapped:
            for buffer in (*each.buffers, *each.expert_parallel_buffers):
                for bucket in buffer.buckets if buffer.ddp_config.use_distributed_optimizer else ():
                    parts = list(bucket.grad_data.chunk(buffer.data_parallel_world_size))
                    own = parts[dist.get_rank(buffer.data_parallel_group)].clone()
                    dist.all_gather(parts, own, group=buffer.data_parallel_group)
        weights = [weight for stage in engine.stages for weight in stage.parameters()]
        with torch.no_grad():
            before = [weight.clone() for weight in weights]
            for weight in weights:
                weight.copy_(weight.main_grad)
            found = {name: gradient.clone() for name, gradient in engine.named_weights()}
            for weight, value in zip(weights, before, strict=True):
                weight.copy_(value)
        engine._loss = None
        engine.optimizer.zero_grad()
        return found if self.rank == 0 else None
