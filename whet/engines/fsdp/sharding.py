# SPDX-License-Identifier: Apache-2.0
"""Sharding: `arrange` places the ranks of a role in a mesh; `shard` converts a model to FSDP2, layer by layer. If the
mesh says so, heads and experts are split over ranks first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel

from whet import devices
from whet.devices import backends
from whet.engines.mesh import Mesh
from whet.errors import ConfigError
from whet.models.caches import attention_heads, key_value_heads
from whet.models.experts import SHARE, ExpertShare, expert_modules, is_special
from whet.models.load import body_of, layers
from whet.models.lora import ADAPTER, adapted_layers
from whet.models.outputs import ForwardSettings, outputs_of, states_of
from whet.models.packing import Layout
from whet.models.sequence_parallel import TokenShare

TENSOR_KEY, EXPERT_KEY = "engine.options.mesh.tensor", "engine.options.mesh.expert"
# True from torch 2.13 on: a rank whose rows do not use a part of the model can send zeros as its gradient.
ADDS_ZEROS = hasattr(FSDPModule, "set_reduce_scatter_unused_params")


class Whole(nn.Module):
    """The forward pass of a model as one module. Before it runs, FSDP2 gathers the weights that no layer has."""

    def __init__(self, model: nn.Module, is_last: bool = True) -> None:
        super().__init__()
        self.model, self.is_last = model, is_last

    def forward(
        self, where: Layout, needs: frozenset[str], settings: ForwardSettings, temperature: float
    ) -> dict[str, torch.Tensor]:
        """Returns copies of the outputs of `outputs_of`, because FSDP2 registers hooks on the tensors that a module
        returns. A pipeline stage before the last returns its hidden states."""
        if not self.is_last:
            return {"states": states_of(self.model, where, settings).clone()}
        outputs = outputs_of(self.model, where, needs, settings, temperature)
        return {name: value.clone() for name, value in outputs.items()}


def shard(
    model: nn.Module,
    ranks: Ranks,
    *,
    is_narrow: bool,
    reshard_after_forward: bool,
    cpu_offload: bool,
    is_last: bool = True,
) -> Whole:
    """Shards the model's parameters in place. `is_narrow`: computes in bfloat16.  Returns the model as one module."""
    body = body_of(model)
    if not ADDS_ZEROS and ranks.rows_group.size() > 1 and body.config.get_text_config() is not body.config:
        found = f"{type(body).__name__} has parts without gradient on rows without images, which other ranks wait for"
        change = "install torch 2.13 or newer, or train on one rank"
        raise ConfigError(f"torch {torch.__version__}", found, "", change)
    if ranks.tensor_mesh is not None:
        split_heads(body, ranks.tensor_mesh)
    experts = list(split_experts(body, ranks))
    options: dict[str, Any] = {
        "mesh": ranks.shard_mesh,
        # Hidden states between layers keep their dtype; autocast converts the inputs of products, as in `single`.
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if is_narrow else None, reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=devices.count() > 0) if cpu_offload else OffloadPolicy(),
    }
    whole = Whole(model, is_last)
    embedding = body.get_input_embeddings()
    head = model.get_output_embeddings() if model is body else None  # type: ignore[operator]
    if embedding.weight is not None and (head is None or head.weight is not embedding.weight):
        fully_shard(embedding, reshard_after_forward=reshard_after_forward, **options)
    for module in experts:  # by columns: ranks have experts of their own, and files keep the rows of two products apart
        own: dict[str, Any] = {**options, "mesh": ranks.expert_shard_mesh, "shard_placement_fn": lambda _: Shard(2)}
        fully_shard(module, reshard_after_forward=reshard_after_forward, **own)
    for layer in (each for each in layers(body) if any(True for _ in each.parameters())):
        fully_shard(layer, reshard_after_forward=reshard_after_forward, **options)
    fully_shard(whole, **options)
    for module in whole.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # losses are divided by counts of all ranks
            module.set_force_sum_reduction_for_comms(True)  # gloo supports no division
            if ADDS_ZEROS:
                module.set_reduce_scatter_unused_params(True)
    return whole


class SummedGradient(ParallelStyle):  # type: ignore[misc]  # torch's class has no types
    """Sums the gradients of a whole weight over the ranks, such as the norm of queries: each rank computes only its own
    heads, and so only a part of the gradient."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()
        seen: set[int] = set()  # FSDP replaces the parameter once

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
    """Splits the linear layers that `base_model_tp_plan` names: each rank gets some heads and some neurons of an MLP.
    Embedding, norms and output stay whole on every rank. `split_experts` splits experts.  Raises: ConfigError if the
    layers cannot be split.

    Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053."""
    config, body = model.config.get_text_config(), model.base_model
    known = {name: style for name, style in (config.base_model_tp_plan or {}).items() if name.startswith("layers.")}
    known = {name: style for name, style in known.items() if ".experts" not in name}
    unknown = sorted({style for style in known.values() if style not in STYLES})
    if unknown or not known:
        what = f"has layers of the kinds {', '.join(unknown)}" if unknown else "has no base_model_tp_plan"
        change = "set it to 1 (and engine.options.mesh.context for long rows)"
        raise ConfigError(TENSOR_KEY, mesh.size(), f"1, as {type(model).__name__} {what}", change)
    names = [name for name, _ in body.named_modules()]
    plan = {name: style for name in names for glob, style in known.items() if fnmatchcase(name, glob)}
    rows = (name for name, style in plan.items() if style.startswith("rowwise") and "attn" not in name)
    inner: set[int] = {getattr(body.get_submodule(name), "in_features") for name in rows}  # noqa: B009  # of a Linear
    sizes = {"attention heads": attention_heads(config), "key-value heads": key_value_heads(config)}
    counts = [*sizes.items(), *(("neurons of an MLP", each) for each in sorted(inner))]
    if wrong := [f"{count} {what}" for what, count in counts if count % mesh.size()]:
        valid = [each for each in divisors(key_value_heads(config)) if not any(n % each for _, n in counts)]
        change = f"try {', '.join(str(each) for each in valid)}"
        raise ConfigError(TENSOR_KEY, mesh.size(), f"a divisor of the model's {' and '.join(wrong)}", change)
    adapted = adapted_layers(body)
    styles: dict[str, str] = {}
    for name, style in plan.items():
        if name not in adapted:
            styles[name] = style
            continue
        # Of the adapter's product B A x, the matrix on the split side of the layer is split too; the other is whole.
        styles[f"{name}.base_layer"] = style
        styles[f"{name}.{'lora_A' if style.startswith('rowwise') else 'lora_B'}.{ADAPTER}"] = style
    parallelize_module(body, mesh, {name: STYLES[style]() for name, style in styles.items()}, src_data_rank=None)


def split_experts(model: PreTrainedModel, ranks: Ranks) -> Iterator[nn.Module]:
    """Gives each rank some of the experts [E, ...] of every expert layer.  Yields the layers.  Raises: ConfigError."""
    mesh, found = ranks.mesh, list(expert_modules(model))
    if mesh.expert > 1 and not found:
        raise ConfigError(EXPERT_KEY, mesh.expert, f"1, as {type(model).__name__} has no experts", "unset it")
    if ranks.expert_mesh is None:
        return
    places, shards = ranks.expert_mesh["experts"], mesh.holders // mesh.expert
    for name, module in found:
        key, size = (EXPERT_KEY, mesh.expert) if mesh.expert > 1 else (TENSOR_KEY, mesh.tensor)
        if is_special(module):
            raise ConfigError(key, size, f"1, as experts of {type(model).__name__} have biases or another form", "")
        if name.endswith(".base_layer"):
            raise ConfigError(key, size, f"1, as model.lora.target_modules names {name.partition('.base')[0]}", "")
        if module.num_experts % places.size():
            expected = f"with the product of tensor and expert a divisor of {module.num_experts} experts ({name})"
            raise ConfigError(key, size, expected, f"try a divisor of {module.num_experts}")
        for own, weight in list(module.named_parameters(recurse=False)):
            if weight.shape[2] % shards:
                expected = f"shard x context / expert a divisor of {weight.shape[2]} ({name}.{own})"
                raise ConfigError(key, size, expected, "raise it")
            part = torch.empty(
                module.num_experts // places.size(), *weight.shape[1:], device="meta", dtype=weight.dtype
            )
            split = DTensor.from_local(part, places, [Shard(0)], run_check=False)
            setattr(module, own, nn.Parameter(split, requires_grad=weight.requires_grad))
        tensor = None if ranks.tensor_mesh is None else ranks.tensor_mesh.get_group()
        setattr(module, SHARE, ExpertShare(ranks.expert_group, tensor))
        yield module


@dataclass(frozen=True)
class Ranks:
    """The ranks of a role, in meshes and groups. Weights are sharded over `shard_mesh`; if it has two dimensions, the
    first counts copies. Each group has this rank and its partners in a split: by stages, experts, tokens or rows."""

    group: dist.ProcessGroup
    pipeline_group: dist.ProcessGroup  # one rank of each stage; the meshes and groups below are of this rank's stage
    mesh: Mesh
    shard_mesh: DeviceMesh
    tensor_mesh: DeviceMesh | None  # ranks that split heads and MLP neurons
    expert_mesh: DeviceMesh | None  # (copies,) shards of an expert, parts of the experts
    expert_group: dist.ProcessGroup  # ranks with different experts and different tokens
    context_group: dist.ProcessGroup  # ranks with different tokens of the same rows
    rows_group: dist.ProcessGroup  # together they read every row once

    def token_share(self, heads: int) -> TokenShare:
        """Returns the split of a row's tokens over context ranks. Each `heads` consecutive ranks split the heads."""
        grid = torch.tensor(dist.get_process_group_ranks(self.context_group)).view(-1, heads)
        inner, outer = _line(self.context_group, grid.tolist()), _line(self.context_group, grid.T.tolist())
        return TokenShare(self.context_group, inner, outer)

    @property
    def expert_shard_mesh(self) -> DeviceMesh:
        """Returns the mesh of the ranks that hold shards and copies of the same experts."""
        assert self.expert_mesh is not None and self.expert_mesh.mesh_dim_names is not None
        return self.expert_mesh[self.expert_mesh.mesh_dim_names[:-1]]


def arrange(group: dist.ProcessGroup | None, device_type: str, given: Mapping[str, int] | None) -> Ranks:
    """Arranges the ranks of `group` (None: this process alone) in a mesh of the sizes `given`."""
    group = group if group is not None else _alone(device_type)
    mesh, everyone = Mesh.of(group.size(), given), group
    stages = torch.tensor(dist.get_process_group_ranks(group)).view(mesh.pipeline, -1)
    group, pipeline_group = _line(everyone, stages.tolist()), _line(everyone, stages.T.tolist())
    names = tuple(name for name in ("replicate", "shard") if mesh.replicate > 1 or name == "shard")
    sizes = {"replicate": mesh.replicate, "shard": mesh.holders, "tensor": mesh.tensor}
    whole = _mesh(group, {name: size for name, size in sizes.items() if size > 1 or name == "shard"}, device_type)
    parts = {"replicate": mesh.replicate, "shard": mesh.holders // mesh.expert, "experts": mesh.expert * mesh.tensor}
    splits = parts["experts"] > 1
    experts = {name: size for name, size in parts.items() if size > 1 or name != "replicate"}
    grid = torch.tensor(dist.get_process_group_ranks(group))
    return Ranks(
        group=everyone,
        pipeline_group=pipeline_group,
        mesh=mesh,
        shard_mesh=whole[names],
        tensor_mesh=whole["tensor"] if mesh.tensor > 1 else None,
        expert_mesh=_mesh(group, experts, device_type) if splits else None,
        expert_group=_line(group, grid.view(-1, mesh.expert, mesh.tensor).mT.reshape(-1, mesh.expert).tolist()),
        context_group=_line(group, grid.view(-1, mesh.context, mesh.tensor).mT.reshape(-1, mesh.context).tolist()),
        rows_group=_line(group, grid.view(-1, mesh.row_ranks).T.tolist()),
    )


def divisors(number: int) -> list[int]:
    """Returns the divisors of a number, ascending."""
    return [each for each in range(1, number + 1) if number % each == 0]


def _mesh(group: dist.ProcessGroup, sizes: Mapping[str, int], device_type: str) -> DeviceMesh:
    """Builds a mesh of the group's ranks. Only ranks of the group have to call it."""
    grid = torch.tensor(dist.get_process_group_ranks(group)).view(*sizes.values())
    lines = [grid.movedim(dim, -1).reshape(-1, grid.shape[dim]).tolist() for dim in range(grid.dim())]
    groups = [_line(group, each) for each in lines]
    return DeviceMesh.from_group(groups, device_type, mesh=grid, mesh_dim_names=tuple(sizes))


def _line(group: dist.ProcessGroup, lines: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """Returns the process group of the list in `lines`, lists of rank numbers, that contains this rank."""
    ranks = next(line for line in lines if dist.get_rank() in line)
    if list(ranks) == dist.get_process_group_ranks(group):
        return group
    made = dist.new_group(list(ranks), use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made


def _alone(device_type: str) -> dist.ProcessGroup:
    """Returns a process group that has only this process. All roles of the process share it."""
    if not dist.is_initialized():
        dist.init_process_group(backends(device_type), store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    return dist.group.WORLD
