# SPDX-License-Identifier: Apache-2.0
"""The engine on Megatron-Core: its layers, schedules, gradient buffers and optimizers, whet's rows and objectives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from whet.devices import HOST
from whet.engines.engine import Engine, rows_of
from whet.engines.fsdp.pipeline import everywhere, run_forward
from whet.engines.megatron import checkpoint, sizes as checks
from whet.engines.megatron.core import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    OptimizerConfig,
    clip_grad_by_total_norm_fp32,
    finalize_model_grads,
    get_forward_backward_func,
    get_megatron_optimizer,
)
from whet.engines.megatron.model import config_of, outputs_of, pack, stage_of
from whet.engines.megatron.names import check_family
from whet.engines.megatron.ranks import arrange, join
from whet.engines.megatron.sizes import Sizes
from whet.engines.megatron.weights import fill, named
from whet.engines.protocol import Columns, Objective, Spread
from whet.engines.role import RoleSettings
from whet.errors import ConfigError, EngineError
from whet.metrics import Metrics
from whet.models.load import body_of
from whet.models.outputs import layout_of, tokens_of
from whet.models.packing import ROUTED, Layout
from whet.models.sequence_parallel import heads_ranks
from whet.options import Count
from whet.registry import register_engine


@register_engine(
    "megatron",
    refuses="whet.engines.megatron.sizes:refuses",
    writes="whet.engines.megatron.folders:write",
    reads="whet.engines.megatron.folders:read",
)
class MegatronEngine(Engine):
    """Megatron-Core's GPTModel of its local layers, for Llama, Qwen 2.5 and 3, Qwen3-MoE and Mixtral.

    tensor: parts of a layer's heads and inner numbers, and of a row's tokens between them.
    pipeline: parts of the layers, one after another.
    virtual: parts of a rank's layers, interleaved with those of the others: less waiting, more messages.
    expert: parts of the experts, over the ranks of a stage.
    context: parts of a row's tokens, which ranks exchange for heads in attention.
    distributed_optimizer: the optimizer's state in shards over the ranks that read different rows.
    hugging_face: checkpoints have the weights in Hugging Face's form too, which `whet export` reads.
    """

    refuses = staticmethod(checks.refuses)
    adapter_weights = adapter_off = fingerprint = None  # type: ignore[assignment]  # it trains no adapter

    def __init__(
        self,
        role: RoleSettings,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device = HOST,
        *,
        tensor: Count = 1,
        pipeline: Count = 1,
        virtual: Count = 1,
        expert: Count = 1,
        context: Count = 1,
        distributed_optimizer: bool = False,
        hugging_face: bool = True,
    ) -> None:
        join(process_group, device)
        role = replace(role, lora=None)
        self.sizes = Sizes(tensor, pipeline, virtual, expert, context)
        self.ranks, self._hugging_face = arrange(self.sizes, device), hugging_face
        super().__init__(role.empty_model(device), role, dist.group.WORLD, device)
        self.config: Any = body_of(self.model).config
        check_family(self.config)
        self.rows_group, self.row_ranks, self.pipeline_ranks = self.ranks.rows, tensor * context, pipeline
        self.forward_settings = replace(self.forward_settings, packing=True, token_share=self.ranks.row)
        if context > 1 and (heads := heads_ranks(self.config, context, tensor)) < context:
            expected = f"at most {heads}, as ranks share out heads"
            raise ConfigError("engine.options.context", context, expected, f"set it to {heads}")
        dtype, recomputes = self.forward_settings.dtype, role.gradient_checkpointing
        with self.ranks.used():
            own = config_of(self.config, self.sizes, device, dtype, recomputes)
            self.stages = [stage_of(own, self.config, part, role).to(device) for part in range(virtual)]
            self._fill()
            self.wrapped: list[Any] = list(self.stages)
            self.optimizer = None
            if role.optim is not None:
                buffers = DistributedDataParallelConfig(
                    grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer
                )
                self.wrapped = [DistributedDataParallel(own, buffers, stage) for stage in self.stages]
                self.optimizer = cast(Any, Steps(self, distributed_optimizer, dtype))  # has what the base calls
            else:
                for stage in self.stages:
                    stage.requires_grad_(False)

    @classmethod
    def spread(cls, processes: int, options: Mapping[str, Any]) -> Spread:
        """A part of the layers and heads in each process; copies of it hold the other rows."""
        sizes = Sizes.of(options)
        parts = sizes.tensor * sizes.pipeline
        return Spread(parts, row_ranks=parts * sizes.context, token_shares=sizes.context)

    def step(self) -> Metrics:
        with self.ranks.used():
            return super().step()

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        own = named(self.stages, self.config, self.ranks, self.role.is_value_model)
        return everywhere(own, self.ranks.pipeline, self.device)

    def save(self, path: Path, start: dict[str, Any] | None) -> None:
        """A folder in Megatron-Core's distributed form, and with the weights in Hugging Face's."""
        with self.ranks.used():
            checkpoint.save(path, self.stages, self.optimizer, {**self._progress(), "start": start})
        if self._hugging_face:
            checkpoint.save_weights(path, self.named_weights())

    def load(self, path: Path) -> dict[str, Any] | None:
        """Puts back a state of any mesh.  Returns its `start`."""
        with self.ranks.used():
            state = checkpoint.load(path, self.stages, self.optimizer)
        self._load_progress(state)
        start: dict[str, Any] | None = state["start"]
        return start

    def _move(self, device: torch.device, *, weights: bool) -> None:
        if self.device != HOST and isinstance(self.optimizer, Steps):
            move = self.optimizer.inner.offload_to_cpu if device == HOST else self.optimizer.inner.restore_from_cpu
            with self.ranks.used():
                move()

    def _fill(self) -> None:
        """Reads the weights."""
        fill(self.stages, self.config, self.ranks, self.role)

    def _trained(self) -> list[nn.Parameter]:
        return [weight for stage in self.stages for weight in stage.parameters()]

    def _weights_read(self) -> AbstractContextManager[None]:
        return self.ranks.used()

    def passes(self, columns: Columns, block: int) -> list[list[int]]:
        """Returns as many passes on every rank: all take part in exchanging tokens with experts."""
        if ROUTED in columns:
            raise EngineError(ROUTED, "experts of the rollout", "none: megatron replays no choices", "set it to fsdp")
        return self._evened(super().passes(columns, block), step=self.sizes.pipeline if self.sizes.virtual > 1 else 1)

    def schedule(self, columns: Columns, objective: Objective, counts: Columns, metrics: Metrics) -> torch.Tensor:
        passes, total = self.passes(columns, objective.block), torch.zeros((), device=self.device)
        if not passes:
            return total
        parts = [rows_of(columns, rows) for rows in passes]
        layouts = [layout_of(part, self.forward_settings).to(self.device) for part in parts]
        width = max(map(self._width, layouts))

        def loss_of(number: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
            found = outputs_of(
                self.stages[-1], hidden, layouts[number], objective.needs, self.forward_settings, objective.temperature
            )
            loss = self._loss_of(found, parts[number] if passes[number] else None, objective, counts, metrics)
            if passes[number]:
                total.add_(loss.detach())
            return loss, torch.zeros((), dtype=torch.int), {}  # none of the tokens to divide by

        def forward(numbers: Iterator[int], stage: Any) -> tuple[torch.Tensor, Any]:
            number = next(numbers)
            size = width if self.sizes.pipeline > 1 else self._width(layouts[number])
            ids, packed = pack(body_of(self.model), layouts[number], size, self.ranks.context)
            return stage(ids, None, None, packed_seq_params=packed), partial(loss_of, number)

        numbers = [iter(range(len(passes))) for _ in self.wrapped]
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=numbers if len(numbers) > 1 else numbers[0],
            model=self.wrapped if len(numbers) > 1 else self.wrapped[0],
            num_microbatches=len(passes),
            seq_length=width,
            micro_batch_size=1,
            forward_only=False,
        )
        return total

    def _width(self, where: Layout) -> int:
        """Tokens with padding, which ranks share out evenly."""
        return tokens_of(where, self.forward_settings) * self.row_ranks

    def _outputs(self, where: Layout, needs: frozenset[str], temperature: float) -> dict[str, torch.Tensor]:
        ranks, settings, count = self.ranks, self.forward_settings, self.sizes.pipeline * self.sizes.virtual
        ids, packed = pack(body_of(self.model), where, self._width(where), ranks.context)

        def run(index: int, stage: Any, received: torch.Tensor | None) -> dict[str, torch.Tensor]:
            stage.set_input_tensor(received)
            hidden = stage(ids, None, None, packed_seq_params=packed)
            if index < count - 1:
                return {"states": hidden}
            return outputs_of(stage, hidden, where, needs, settings, temperature)

        indices = range(dist.get_rank(ranks.pipeline), count, self.sizes.pipeline)
        runs = {index: partial(run, index, stage) for index, stage in zip(indices, self.stages, strict=True)}
        shape = tokens_of(where, settings), 1, self.config.hidden_size
        found = run_forward(runs, count, torch.empty(shape, dtype=settings.dtype, device=self.device), ranks.pipeline)
        return found if needs <= found.keys() else {name: torch.zeros(where.shape) for name in needs}

    def _sum_gradients(self) -> None:
        finalize_model_grads(self.wrapped)

    def _clip(self) -> torch.Tensor:
        """The norm of the gradient before it is clipped: of all shards, each counted once."""
        assert isinstance(self.optimizer, Steps)
        return torch.tensor(self.optimizer.clip(self.grad_clip), device=self.device)


class Steps:
    """Megatron-Core's optimizer of this rank's weights or shards of them."""

    def __init__(self, engine: MegatronEngine, distributed: bool, dtype: torch.dtype) -> None:
        optim = engine.role.optim
        assert optim is not None
        settings = OptimizerConfig(
            optimizer="adam",
            lr=optim.lr,
            weight_decay=optim.weight_decay,
            adam_beta1=optim.betas[0],
            adam_beta2=optim.betas[1],
            adam_eps=optim.eps,
            use_distributed_optimizer=distributed,
            clip_grad=0.0,
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
        )
        self.wrapped = engine.wrapped
        self.inner: Any = get_megatron_optimizer(settings, engine.wrapped, use_gloo_process_groups=False)
        for group in self.param_groups:
            group["weight_decay"] = optim.weight_decay * group.get("wd_mult", 1.0)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of weights with their rates."""
        found: list[dict[str, Any]] = self.inner.param_groups
        return found

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients."""
        for stage in self.wrapped:
            stage.zero_grad_buffer()
        self.inner.zero_grad(set_to_none)

    def clip(self, largest: float | None) -> float:
        """Clips the gradients.  Returns their norm before."""
        self.inner.prepare_grads()
        norm = float(self.inner.get_grad_norm())
        for each in self.inner.chained_optimizers if largest is not None else ():
            if not each.is_stub_optimizer and (weights := each.get_parameters()):
                clip_grad_by_total_norm_fp32(weights, largest, norm)
        return norm

    def allocate(self) -> None:
        """Makes the state before the first step, which a checkpoint is read into."""
        for each in self.inner.chained_optimizers:
            own = each.optimizer
            for weight in (weight for group in own.param_groups for weight in group["params"]):
                if isinstance(own, torch.optim.AdamW) and not own.state[weight]:
                    moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
                    own.state[weight] = {"step": torch.zeros(()), **moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts back a state. All weights then have one tensor that counts their steps: each gets its own."""
        self.inner.load_state_dict(state)
        for each in self.inner.chained_optimizers:
            for own in each.optimizer.state.values():
                own.update({name: value.clone() for name, value in own.items() if name == "step"})

    def step(self) -> None:
        """Changes the weights."""
        self.inner.step_with_ready_grads()
