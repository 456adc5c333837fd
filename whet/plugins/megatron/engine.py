# SPDX-License-Identifier: Apache-2.0
"""The engine on Megatron-Core: its layers, schedules, gradient buffers and optimizers, with whet's rows and
objectives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn

from whet.devices import HOST
from whet.engines.engine import Engine, rows_of
from whet.engines.protocol import Columns, Objective, Spread
from whet.engines.role import RoleSettings
from whet.engines.stages import everywhere, run_forward
from whet.errors import ConfigError, EngineError
from whet.metrics import Metrics
from whet.models.load import body_of
from whet.models.outputs import layout_of, tokens_of
from whet.models.packing import ROUTED, Layout
from whet.models.sequence_parallel import heads_ranks
from whet.options import Count
from whet.plugins.megatron import checkpoint, core, sizes as checks
from whet.plugins.megatron.model import Packed, config_of, in_halves, outputs_of, pack, stage_of
from whet.plugins.megatron.names import check_family
from whet.plugins.megatron.ranks import arrange, join
from whet.plugins.megatron.sizes import Sizes, row_ranks
from whet.plugins.megatron.weights import fill, named
from whet.registry import register_engine


@register_engine(
    "megatron",
    refuses="whet.plugins.megatron.sizes:refuses",
    row_ranks="whet.plugins.megatron.sizes:row_ranks",
    writes="whet.plugins.megatron.folders:write",
    reads="whet.plugins.megatron.folders:read",
)
class MegatronEngine(Engine):
    """Megatron-Core's GPTModel of its local layers, for Llama, Qwen 2.5 and 3, Qwen3-MoE and Mixtral.

    tensor: number of ranks over which a layer's heads and inner dimension are split, and a row's tokens between layers.
    pipeline: number of ranks over which the layers are split, in their order.
    virtual: number of parts of a rank's layers, interleaved with other ranks' parts: less waiting, more messages.
    expert: number of ranks of a pipeline stage over which the experts are split.
    context: number of ranks over which a row's tokens are split.
    context_by: `heads`: ranks exchange tokens for heads in attention; `transformer_engine`: Megatron-Core's own form.
    distributed_optimizer: shards the optimizer's state over the ranks that read different rows.
    hugging_face: checkpoints also have the weights in Hugging Face's form, which `whet export` reads.
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
        context_by: Literal["heads", "transformer_engine"] = "transformer_engine",
        distributed_optimizer: bool = False,
        hugging_face: bool = True,
    ) -> None:
        join(process_group, device)
        self.sizes = Sizes(tensor, pipeline, virtual, expert, context, context_by)
        self.ranks, self._hugging_face = arrange(self.sizes, device), hugging_face
        super().__init__(role.empty_model(device), role, dist.group.WORLD, device)
        self.config: Any = body_of(self.model).config
        check_family(self.config)
        self.rows_group, self.row_ranks, self.pipeline_ranks = self.ranks.rows, tensor * context, pipeline
        forward, halves = self.forward_settings, self.sizes.halves
        shared = forward.share_prompts and not halves
        self.forward_settings = replace(forward, packing=True, share_prompts=shared, token_share=self.ranks.row)
        if context > 1 and not halves and (heads := heads_ranks(self.config, context, tensor)) < context:
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
                buffers = core.DistributedDataParallelConfig(
                    grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer
                )
                self.wrapped = [core.DistributedDataParallel(own, buffers, stage) for stage in self.stages]
                self.optimizer = cast(Any, Steps(self, distributed_optimizer, dtype))  # has the methods that are called
            else:
                for stage in self.stages:
                    stage.requires_grad_(False)

    @classmethod
    def spread(cls, processes: int, options: Mapping[str, Any]) -> Spread:
        """Returns how layers and heads are divided over the processes. Each copy of the model reads other rows."""
        parts, together = options["tensor"] * options["pipeline"], row_ranks(processes, options)
        return Spread(parts, row_ranks=together, token_shares=options["context"])

    def step(self) -> Metrics:
        with self.ranks.used():
            return super().step()

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        own = named(self.stages, self.config, self.ranks, self.role.is_value_model)
        return everywhere(own, self.ranks.pipeline, self.device)

    def save(self, path: Path, start: dict[str, Any] | None) -> None:
        """Writes Megatron-Core's distributed form and, with the option `hugging_face`, weights in Hugging Face's."""
        with self.ranks.used():
            checkpoint.save(path, self.stages, self.optimizer, {**self._progress(), "start": start})
        if self._hugging_face:
            checkpoint.save_weights(path, self.named_weights())

    def load(self, path: Path) -> dict[str, Any] | None:
        """Restores a state that `save` wrote with any mesh.  Returns the `start` in it."""
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
        """Reads the weights into the stages."""
        fill(self.stages, self.config, self.ranks, self.role)

    def _trained(self) -> list[nn.Parameter]:
        return [weight for stage in self.stages for weight in stage.parameters()]

    def _weights_read(self) -> AbstractContextManager[None]:
        return self.ranks.used()

    def passes(self, columns: Columns, block: int | str) -> list[list[int]]:
        """Returns the rows of each forward pass. All ranks make the same number, to exchange tokens with experts."""
        if ROUTED in columns:
            raise EngineError(ROUTED, "the rollout's experts", "none: megatron replays none", "set engine.name to fsdp")
        return self._evened(super().passes(columns, block), step=self.sizes.pipeline if self.sizes.virtual > 1 else 1)

    def schedule(self, columns: Columns, objective: Objective, counts: Columns, metrics: Metrics) -> torch.Tensor:
        passes, total = self.passes(columns, objective.block), torch.zeros((), device=self.device)
        if not passes:
            return total
        parts = [rows_of(columns, rows) for rows in passes]
        layouts = [layout_of(part, self.forward_settings, objective.needs).to(self.device) for part in parts]
        width = max(map(self._width, layouts))

        def loss_of(number: int, packed: Packed, hidden: torch.Tensor) -> tuple[Any, ...]:
            settings, heat = self.forward_settings, objective.temperature
            found = outputs_of(self.stages[-1], hidden, packed, objective.needs, settings, heat)
            loss = self._loss_of(found, parts[number] if passes[number] else None, objective, counts, metrics)
            if passes[number]:
                total.add_(loss.detach())
            return loss, torch.zeros((), dtype=torch.int), {}  # no tokens to divide by

        def forward(numbers: Iterator[int], stage: Any) -> tuple[torch.Tensor, Any]:
            number = next(numbers)
            size = width if self.sizes.pipeline > 1 else self._width(layouts[number])
            ids, packed = pack(body_of(self.model), layouts[number], size, self.ranks)
            return stage(ids, None, None, packed_seq_params=packed), partial(loss_of, number, packed)

        numbers = [iter(range(len(passes))) for _ in self.wrapped]
        core.get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=numbers,
            model=self.wrapped,
            num_microbatches=len(passes),
            seq_length=width,
            micro_batch_size=1,
            forward_only=False,
        )
        return total

    def _width(self, where: Layout) -> int:
        """Returns the number of tokens with padding, which divides evenly over the ranks."""
        if self.sizes.halves:
            return int(in_halves(where, self.sizes)[1][-1])
        return tokens_of(where, self.forward_settings) * self.row_ranks

    def _outputs(self, where: Layout, needs: frozenset[str], temperature: float) -> dict[str, torch.Tensor]:
        ranks, settings, count = self.ranks, self.forward_settings, self.sizes.pipeline * self.sizes.virtual
        width = self._width(where)
        ids, packed = pack(body_of(self.model), where, width, ranks)

        def run(index: int, stage: Any, received: torch.Tensor | None) -> dict[str, torch.Tensor]:
            stage.set_input_tensor(received)
            hidden = stage(ids, None, None, packed_seq_params=packed)
            if index < count - 1:
                return {"states": hidden}
            return outputs_of(stage, hidden, packed, needs, settings, temperature)

        indices = range(dist.get_rank(ranks.pipeline), count, self.sizes.pipeline)
        runs = {index: partial(run, index, stage) for index, stage in zip(indices, self.stages, strict=True)}
        shape = width // self.row_ranks, 1, self.config.hidden_size
        found = run_forward(runs, count, torch.empty(shape, dtype=settings.dtype, device=self.device), ranks.pipeline)
        return found if needs <= found.keys() else {name: torch.zeros(where.shape) for name in needs}

    def _sum_gradients(self) -> None:
        core.finalize_model_grads(self.wrapped)

    def _clip(self) -> torch.Tensor:
        """Clips the gradient. Returns its norm before clipping, in which each shard counts once."""
        assert isinstance(self.optimizer, Steps)
        inner = self.optimizer.inner
        inner.prepare_grads()
        norm = float(inner.get_grad_norm())
        for each in inner.chained_optimizers if self.grad_clip is not None else ():
            if not each.is_stub_optimizer and (weights := each.get_parameters()):
                core.clip_grad_by_total_norm_fp32(weights, self.grad_clip, norm)
        return torch.tensor(norm, device=self.device)


class Steps:
    """Megatron-Core's optimizer of the weights, or shards of weights, on this rank."""

    def __init__(self, engine: MegatronEngine, distributed: bool, dtype: torch.dtype) -> None:
        optim = engine.role.optim
        assert optim is not None
        settings = core.OptimizerConfig(
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
        self.inner: Any = core.get_megatron_optimizer(settings, engine.wrapped, use_gloo_process_groups=False)
        for group in self.param_groups:
            group["weight_decay"] = optim.weight_decay * group.get("wd_mult", 1.0)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of weights with their learning rates."""
        return list(self.inner.param_groups)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets the gradients."""
        for stage in self.wrapped:
            stage.zero_grad_buffer()
        self.inner.zero_grad(set_to_none)

    def state_dict(self, weights: dict[str, Any], steps: int | None, metadata: dict[str, Any]) -> dict[int, Any]:
        """Returns the state after `steps` (None: a template for reading). It contains only tensors, named as in
        `weights`, since another mesh has other optimizers."""
        found: dict[int, Any] = {}
        for number, each in enumerate(self.inner.chained_optimizers):
            self._count(each, 1 if steps is None else steps)  # of 0 steps Megatron-Core reads no state
            found[number] = each.sharded_state_dict(weights, is_loading=steps is None, metadata=metadata)
            for tensors in found[number].get("param_state", {}).values():  # of shards; in float32 a weight's own
                wide = tensors["param"] if each.config.bf16 else tensors.pop("param")
                wide.key = wide.key.replace("state.param.", "state.fp32_param.", 1)
        kept = (core.ShardedBase, core.LocalNonpersistentObject)
        core.dict_list_map_inplace(lambda x: x if isinstance(x, kept) else core.LocalNonpersistentObject(x), found)
        return found

    def load_state_dict(self, state: dict[int, Any], steps: int) -> None:
        """Restores a state that was saved after `steps`."""
        for number, each in enumerate(self.inner.chained_optimizers):
            each.load_state_dict(state[number])
            self._count(each, steps)

    def _count(self, each: Any, steps: int) -> None:
        """Sets the step count of the optimizer `each`, and creates the moments for the next steps."""
        each.init_state_fn(each.optimizer, each.config)
        for group in each.optimizer.param_groups:
            group["step"] = steps  # Apex reads it here, torch in each weight's state
        for own in each.optimizer.state.values():
            if isinstance(each.optimizer, torch.optim.AdamW):
                own["step"] = torch.tensor(float(steps))

    def step(self) -> None:
        """Updates the weights with the prepared gradients."""
        self.inner.step_with_ready_grads()
