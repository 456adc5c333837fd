# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: each rank has some heads and some of the MLP's inner numbers, as the model's own plan says.

Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053. Embedding, norms and output are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel

from whet.engines.fsdp.ranks import divisors
from whet.errors import ConfigError


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
    """Splits the linear layers that `base_model_tp_plan` names.  Raises: ConfigError where that cannot be."""
    config = model.config.get_text_config()
    plan = {name: style for name, style in (config.base_model_tp_plan or {}).items() if name.startswith("layers.")}
    if unknown := sorted({style for style in plan.values() if style not in STYLES}) or not plan:
        what = f"has layers of the kinds {', '.join(unknown)}" if plan and isinstance(unknown, list) else "has no plan"
        raise ConfigError(
            f"engine.options.tensor_parallel_size={mesh.size()}: {type(model).__name__} {what} for it; set it to 1 "
            "(and engine.options.sequence_parallel_size for long rows)"
        )
    sizes = {
        "attention heads": config.num_attention_heads,
        "key-value heads": config.num_key_value_heads,
        "inner numbers of an MLP": config.intermediate_size,
    }
    if wrong := [f"{count} {what}" for what, count in sizes.items() if count % mesh.size()]:
        valid = [each for each in divisors(config.num_key_value_heads) if not any(n % each for n in sizes.values())]
        raise ConfigError(
            f"engine.options.tensor_parallel_size={mesh.size()} does not divide the model's {' and '.join(wrong)}; "
            f"try {', '.join(str(each) for each in valid)}"
        )
    parallelize_module(
        model.base_model, mesh, {name: STYLES[style]() for name, style in plan.items()}, src_data_rank=None
    )
