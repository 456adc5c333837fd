# SPDX-License-Identifier: Apache-2.0
"""The ranks of a role, with their shards of the weights and of the rows; and the model's modules given to torch: layers
one by one, their heads split over ranks first where that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel

from whet import devices
from whet.devices import backends
from whet.errors import ConfigError
from whet.models.load import body_of, layers
from whet.models.outputs import ForwardSettings, outputs_of
from whet.models.packing import Layout

TENSOR_KEY = "engine.options.tensor_parallel_size"
# Ranks whose rows do not reach a part of the model send zeros as its gradient: from torch 2.13 on.
ADDS_ZEROS = hasattr(FSDPModule, "set_reduce_scatter_unused_params")


class Whole(nn.Module):
    """A forward pass from rows to outputs as one module, before which torch gathers the weights outside layers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, where: Layout, needs: frozenset[str], settings: ForwardSettings, temperature: float
    ) -> dict[str, torch.Tensor]:
        """Returns copies of `outputs_of`: FSDP registers hooks on the tensors that a module returns."""
        outputs = outputs_of(self.model, where, needs, settings, temperature)
        return {name: value.clone() for name, value in outputs.items()}


def shard(model: nn.Module, ranks: Ranks, *, is_narrow: bool, reshard_after_forward: bool, cpu_offload: bool) -> Whole:
    """Shards the parameters of the model over `ranks`, in place, and returns its forward pass."""
    body = body_of(model)
    if not ADDS_ZEROS and ranks.rows_group.size() > 1 and body.config.get_text_config() is not body.config:
        found = f"{type(body).__name__} has parts that rows without images do not reach, whose gradients ranks wait for"
        change = "install torch 2.13 or newer, or train on one rank"
        raise ConfigError(f"torch {torch.__version__}", found, "", change)
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
            if ADDS_ZEROS:
                module.set_reduce_scatter_unused_params(True)
    return whole


class SummedGradient(ParallelStyle):  # type: ignore[misc]  # torch's class has no types
    """Weights that are whole on every rank and see its own heads only, such as norms of queries: their gradients are
    summed over the ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()
        seen: set[int] = set()  # FSDP puts another parameter in the place of the first, and then keeps that

        def add_up(weight: torch.Tensor) -> None:
            assert weight.grad is not None
            dist.all_reduce(weight.grad, group=group)

        def before(module: nn.Module, _: Any) -> None:
            for weight in module.parameters(recurse=False):
                if torch.is_grad_enabled() and weight.requires_grad and id(weight) not in seen:
                    weight.register_post_accumulate_grad_hook(add_up)
                    seen.add(id(weight))

        module.register_forward_pre_hook(before)
        return module


STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": partial(ColwiseParallel, output_layouts=Replicate()),
    "colwise_rep": partial(ColwiseParallel, output_layouts=Replicate()),
    "rowwise_split_input": partial(RowwiseParallel, input_layouts=Replicate()),
    "rowwise_rep": partial(RowwiseParallel, input_layouts=Replicate()),
    "replicated_with_grad_allreduce": SummedGradient,
}


def split_heads(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Splits the linear layers that `base_model_tp_plan` names: each rank has some heads and some of an MLP's inner
    numbers; embedding, norms and output are whole on every rank.  Raises: ConfigError where that cannot be.

    Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053."""
    config = model.config.get_text_config()
    plan = {name: style for name, style in (config.base_model_tp_plan or {}).items() if name.startswith("layers.")}
    if unknown := sorted({style for style in plan.values() if style not in STYLES}) or not plan:
        what = f"has layers of the kinds {', '.join(unknown)}" if plan and isinstance(unknown, list) else "has no plan"
        change = "set it to 1 (and engine.options.sequence_parallel_size for long rows)"
        raise ConfigError(TENSOR_KEY, mesh.size(), f"1, as {type(model).__name__} {what} for it", change)
    sizes = {
        "attention heads": config.num_attention_heads,
        "key-value heads": config.num_key_value_heads,
        "inner numbers of an MLP": config.intermediate_size,
    }
    if wrong := [f"{count} {what}" for what, count in sizes.items() if count % mesh.size()]:
        valid = [each for each in divisors(config.num_key_value_heads) if not any(n % each for n in sizes.values())]
        change = f"try {', '.join(str(each) for each in valid)}"
        raise ConfigError(TENSOR_KEY, mesh.size(), f"a divisor of the model's {' and '.join(wrong)}", change)
    parallelize_module(
        model.base_model, mesh, {name: STYLES[style]() for name, style in plan.items()}, src_data_rank=None
    )


@dataclass(frozen=True)
class Ranks:
    """The ranks of a role. `inner` consecutive ones read the same rows: each a part of their tokens or of the model's
    heads. Weights lie in shards over `shard_mesh`, whose first dimension counts replicas where it has two."""

    group: dist.ProcessGroup
    inner: int
    shard_mesh: DeviceMesh
    tensor_mesh: DeviceMesh | None  # over the inner ranks, where they split the model
    inner_group: dist.ProcessGroup
    rows_group: dist.ProcessGroup  # ranks with the same place among the inner ones: together they read every row once


def arrange(
    group: dist.ProcessGroup | None,
    device_type: str,
    shard_size: int | None,
    sequence_parallel: int,
    tensor_parallel: int,
) -> Ranks:
    """The arrangement of the ranks in `group` (None: of this process alone), which the sizes divide."""
    group = group if group is not None else _alone(device_type)
    ranks = dist.get_process_group_ranks(group)
    inner = sequence_parallel * tensor_parallel
    holders = len(ranks) // tensor_parallel  # of different shards or replicas of them
    shards = holders if shard_size is None else shard_size
    sizes = {"replicate": holders // shards, "shard": shards, "tensor": tensor_parallel}
    mesh = _mesh(group, {name: size for name, size in sizes.items() if size > 1 or name == "shard"}, device_type)
    names = tuple(name for name in ("replicate", "shard") if sizes[name] > 1 or name == "shard")
    grid = torch.tensor(ranks).view(-1, inner)
    return Ranks(
        group=group,
        inner=inner,
        shard_mesh=mesh[names],
        tensor_mesh=mesh["tensor"] if tensor_parallel > 1 else None,
        inner_group=_line(group, grid.tolist()),
        rows_group=_line(group, grid.T.tolist()),
    )


def divisors(number: int) -> list[int]:
    """Returns the divisors, rising."""
    return [each for each in range(1, number + 1) if number % each == 0]


def _mesh(group: dist.ProcessGroup, sizes: Mapping[str, int], device_type: str) -> DeviceMesh:
    """The group's ranks in this shape, without a call on ranks that are not in it."""
    grid = torch.tensor(dist.get_process_group_ranks(group)).view(*sizes.values())
    lines = [grid.movedim(dim, -1).reshape(-1, grid.shape[dim]).tolist() for dim in range(grid.dim())]
    groups = [_line(group, each) for each in lines]
    return DeviceMesh.from_group(groups, device_type, mesh=grid, mesh_dim_names=tuple(sizes))


def _line(group: dist.ProcessGroup, lines: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """The group of that one of the lines that this rank is in."""
    ranks = next(line for line in lines if dist.get_rank() in line)
    if list(ranks) == dist.get_process_group_ranks(group):
        return group
    made = dist.new_group(list(ranks), use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made


def _alone(device_type: str) -> dist.ProcessGroup:
    """A group of this process, which roles of one process share."""
    if not dist.is_initialized():
        dist.init_process_group(backends(device_type), store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    return dist.group.WORLD
