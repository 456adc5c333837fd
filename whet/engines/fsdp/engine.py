# SPDX-License-Identifier: Apache-2.0
"""The sharded training engine. Every rank holds a shard of each weight, of its gradient and of its optimizer state.

Layers are gathered one at a time before use, and freed after it. Sums over ranks equal the sums of `SingleEngine`, so
both engines take the same steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from whet.devices import HOST
from whet.engines.engine import Engine, rows_of
from whet.engines.fsdp import checkpoint, checks
from whet.engines.fsdp.pipeline import padded, run_schedule, stages_of
from whet.engines.fsdp.sharding import arrange, shard
from whet.engines.mesh import Mesh, row_ranks
from whet.engines.optim import form_of, optimizer_for, optimizers_of
from whet.engines.protocol import Columns, Objective, Spread
from whet.engines.role import RoleSettings
from whet.engines.stages import everywhere, run_forward
from whet.kernels.compact_adamw import CompactAdamW, own_part
from whet.kernels.compiled_layers import compile_layers
from whet.metrics import Metrics
from whet.models.load import body_of, cast_weights, layers
from whet.models.outputs import layout_of, tokens_of
from whet.models.packing import Layout
from whet.models.sequence_parallel import heads_ranks
from whet.options import Count, NonNegative
from whet.registry import register_engine


@register_engine(
    "fsdp",
    refuses="whet.engines.fsdp.checks:refuses",
    row_ranks="whet.engines.mesh:row_ranks",
    former="whet.engines.mesh:of_former",
)
class FSDPEngine(Engine):
    """Weights, gradients and optimizer state in shards over the ranks of `process_group`, by torch's FSDP2.

    mesh: sizes of the grid of processes: replicate (copies), shard (parts of the weights and of a mini-batch's rows),
        context (parts of a row's tokens), tensor (parts of the heads and of an MLP's neurons), expert (parts of the
        experts, over shard x context), pipeline (parts of the layers). If shard or replicate is unset, it takes all
        remaining processes.
    reshard_after_forward: frees gathered layers after the forward pass, and gathers them again for the backward pass.
    cpu_offload: weights and optimizer stay on the host, and gradients are moved to it.
    stages_per_rank: pipeline stages on each rank; more than one are interleaved: less waiting, more messages.
    compile: compiles the layers: a slower start, faster steps.
    router_bias_rate: step by which an update moves each expert's bias in the routers of DeepSeek-V3, GLM-4.5 and
        others: up if fewer tokens than the mean chose the expert, else down. In DeepSeek-V3's pretraining 0.001, and 0
        at its end.
    """

    refuses = staticmethod(checks.refuses)

    def __init__(
        self,
        role: RoleSettings,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device = HOST,
        *,
        mesh: dict[Literal["replicate", "shard", "context", "tensor", "expert", "pipeline"], Count] | None = None,
        reshard_after_forward: bool = True,
        cpu_offload: bool = False,
        stages_per_rank: Count = 1,
        compile: bool = False,  # noqa: A002  # the option's name
        router_bias_rate: NonNegative = 0.0,
    ) -> None:
        self.ranks = arrange(process_group, device.type, mesh)  # type: ignore[arg-type]  # the keys are text
        super().__init__(role.empty_model(device), role, self.ranks.group, device, router_bias_rate)
        self.rows_group, sizes = self.ranks.rows_group, self.ranks.mesh
        self.row_ranks, self.pipeline_ranks = sizes.row_ranks, sizes.pipeline
        model, optim = self.model, role.optim
        forward = self.forward_settings = replace(self.forward_settings, is_sharded=True)
        if (context := sizes.context) > 1:
            heads = heads_ranks(body_of(model).config.get_text_config(), context, sizes.tensor)
            self.forward_settings = replace(forward, token_share=self.ranks.token_share(heads))
        self._sums_wide = optim is not None and optim.weight_rounding is not None
        if self._sums_wide:
            cast_weights(model, torch.bfloat16)
        if compile:
            compile_layers(layers(body_of(model)))
        parts, width = [model], sizes.pipeline
        own, self._num_stages = range(dist.get_rank(self.ranks.pipeline_group), width * stages_per_rank, width), 1
        if width > 1:
            self._num_stages = width * stages_per_rank
            model, parts = stages_of(model, self._num_stages, own)  # type: ignore[assignment]  # of the same class
            self.model = model
        self._stages = {
            index: shard(
                part,
                self.ranks,
                is_narrow=forward.dtype == torch.bfloat16,
                reshard_after_forward=reshard_after_forward,
                cpu_offload=cpu_offload,
                is_last=index == self._num_stages - 1,
            )
            for index, part in zip(own, parts, strict=False)
        }
        role.fill(model, HOST if cpu_offload else device)
        self._stays_on_host = cpu_offload
        self.optimizer = optimizer_for(model, optim, role.seed) if optim is not None else None
        if self._sums_wide:
            for weight in self._trained():
                weight.grad_dtype = None  # gradients are summed up in float32, although weights are bfloat16

    @classmethod
    def spread(cls, processes: int, options: Mapping[str, Any]) -> Spread:
        """Returns the placement: each process has a shard of weights, gradients and optimizer state."""
        mesh, together = Mesh.of(processes, options["mesh"]), row_ranks(processes, options)
        return Spread(mesh.shards, options["cpu_offload"], together, token_shares=mesh.context)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._reshard()
        if self._num_stages == 1:
            return super().named_weights()
        return everywhere(super().named_weights(), self.ranks.pipeline_group, self.device)

    def adapter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._reshard()
        return super().adapter_weights()

    @torch.no_grad()
    def _gathered(self, weight: torch.Tensor) -> torch.Tensor:
        return _gathered(weight.detach().to(self.device)) if isinstance(weight, DTensor) else weight.detach()

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        outputs = super().forward(*args, **kwargs)
        self._reshard()
        return outputs

    def save(self, path: Path, start: dict[str, Any] | None) -> None:
        """Writes a folder in which each rank has one or more files with its shards."""
        checkpoint.save(path, self._saved(), self._states(), {**self._progress(), "start": start}, self.ranks.group)

    def load(self, path: Path) -> dict[str, Any] | None:
        """Restores a state that any number of ranks wrote.  Returns its `start`, the description of an adapter's base.

        Raises: EngineError for the state of another model or engine; CheckpointError for one of another optimizer."""
        state = checkpoint.load(path, self._saved(), self._states(), form_of(self.role.optim), self.ranks.group)
        for optimizer in optimizers_of(self.optimizer):
            for weight, kept in optimizer.state.items():
                if isinstance(optimizer, CompactAdamW):  # keeps its rank's part as plain tensors
                    kept.update({name: own_part(value) for name, value in kept.items()})
                elif checkpoint.STEP in kept:  # torch's AdamW wants its step count on the weight's device
                    kept[checkpoint.STEP] = kept[checkpoint.STEP].to(weight.device)
        self._load_progress(state)
        start: dict[str, Any] | None = state["start"]
        return start

    def _saved(self) -> dict[str, torch.Tensor]:
        """Returns the weights of a checkpoint; with an adapter, only the adapter's weights."""
        self._reshard()
        return self._checkpointed()

    def _move(self, device: torch.device, *, weights: bool) -> None:
        self._reshard()
        if not self._stays_on_host:
            super()._move(device, weights=weights)

    def _reshard(self) -> None:
        """Frees gathered weights. torch itself keeps the weights of the outermost module after a forward pass."""
        for module in chain.from_iterable(whole.modules() for whole in self._stages.values()):
            if isinstance(module, FSDPModule):
                module.reshard()

    def _states(self) -> dict[str, dict[str, torch.Tensor]]:
        """Returns the optimizer's state of each trained weight."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        names = {id(weight): name for name, weight in self.model.named_parameters()}
        for optimizer in optimizers_of(self.optimizer):
            for group in optimizer.param_groups:
                found |= {names[id(weight)]: optimizer.state[weight] for weight in group["params"]}
        return found

    def passes(self, columns: Columns, block: int | str) -> list[list[int]]:
        """Splits rows into micro-batches, as many on every rank, because all ranks take part in gathering weights."""
        ends = (self._num_stages, self.pipeline_ranks) if self._num_stages > 1 else (0, 1)  # torch's schedules need it
        return self._evened(super().passes(columns, block), *ends)

    def schedule(self, columns: Columns, objective: Objective, counts: Columns, metrics: Metrics) -> torch.Tensor:
        if self._num_stages == 1:
            return super().schedule(columns, objective, counts, metrics)
        passes, total = self.passes(columns, objective.block), torch.zeros((), device=self.device)
        parts = [rows_of(columns, rows) for rows in passes]
        layouts = [layout_of(part, self.forward_settings, objective.needs).to(self.device) for part in parts]
        tokens = max(tokens_of(where, self.forward_settings) for where in layouts)

        def run(index: int, number: int, hidden: torch.Tensor | None) -> torch.Tensor:
            self._keep_gradients()
            found = self._stage(index, layouts[number], hidden, objective.needs, objective.temperature)
            if index < self._num_stages - 1:
                return padded(found["states"], tokens)
            loss = self._loss_of(found, parts[number] if passes[number] else None, objective, counts, metrics)
            if passes[number]:
                total.add_(loss.detach())
            return loss

        shape = tokens, body_of(self.model).config.hidden_size
        runs = {index: partial(run, index) for index in self._stages}
        run_schedule(runs, self._num_stages, shape, len(passes), self.ranks.pipeline_group, self.device)
        self._keep_gradients()
        return total

    def _stage(
        self, index: int, where: Layout, hidden: torch.Tensor | None, needs: frozenset[str], temperature: float
    ) -> dict[str, torch.Tensor]:
        """Computes the outputs of pipeline stage `index`. `hidden` are the padded hidden states of the stage before."""
        whole = self._stages[index]
        if hidden is not None:
            receives: Any = body_of(whole.model).get_input_embeddings()
            receives.hidden = hidden[None, : tokens_of(where, self.forward_settings)]
        outputs: dict[str, torch.Tensor] = whole(where, needs, self.forward_settings, temperature)
        return outputs

    def _outputs(self, where: Layout, needs: frozenset[str], temperature: float) -> dict[str, torch.Tensor]:
        size = tokens_of(where, self.forward_settings), body_of(self.model).config.get_text_config().hidden_size
        given = partial(self._stage, needs=needs, temperature=temperature)
        runs = {index: partial(given, index, where) for index in self._stages}
        found = run_forward(runs, self._num_stages, torch.empty(size, device=self.device), self.ranks.pipeline_group)
        return found if needs <= found.keys() else {name: torch.zeros(where.shape) for name in needs}

    def _keep_gradients(self) -> None:
        """Converts gradients to float32 between passes, if the weights are bfloat16."""
        if self._sums_wide:
            for weight in self._trained():
                if weight.grad is not None and weight.grad.dtype != torch.float32:
                    weight.grad = weight.grad.float()

    @torch.no_grad()
    def _clip(self) -> torch.Tensor:
        """Clips the gradient.  Returns its norm before clipping. Each shard counts once, even if it has copies."""
        grads = [weight.grad for weight in self._trained() if isinstance(weight.grad, DTensor)]
        size, squares = self.ranks.mesh.stage_ranks, torch.zeros((), dtype=torch.float64, device=self.device)
        for grad in grads:
            copies = size // _shards(grad)
            squares += grad.to_local().norm().to(squares) ** 2 / copies
        dist.all_reduce(squares, group=self.ranks.group)
        norm = squares.sqrt().float()
        if self.grad_clip is not None:
            scale = (self.grad_clip / (norm + 1e-6)).clamp(max=1.0)
            for grad in grads:
                grad.to_local().mul_(scale.to(grad.device))
        return norm


def _gathered(weight: Any) -> torch.Tensor:
    """Gathers a sharded weight, over one mesh dimension after another. (torch's own function would warn.)"""
    placements = list(weight.placements)
    for dim in range(len(placements)):
        placements[dim] = Replicate()
        weight = weight.redistribute(placements=placements)
    whole: torch.Tensor = weight.to_local()
    return whole


def _shards(tensor: DTensor) -> int:
    """Returns the number of different shards of a tensor; copies of a shard are not counted."""
    placed = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return prod(size for placement, size in placed if not placement.is_replicate())
