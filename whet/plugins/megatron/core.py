# SPDX-License-Identifier: Apache-2.0
"""The names of Megatron-Core that the engine uses, and a way to run it on a machine without an accelerator.

Megatron-Core calls CUDA functions and devices directly. Inside a block of `on_device` these calls are replaced, but
only for tensors on the host."""

# ruff: noqa: F401  # names for the other files
from __future__ import annotations

import queue
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from whet.devices import HOST

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of TransformerEngine and Apex, which are not needed
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.extensions import transformer_engine
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import (
        gather_from_sequence_parallel_region,
        model_parallel_cuda_manual_seed,
        random,
    )
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None  # 0.16.1 reads the name even where TransformerEngine is absent


class _Here:
    """Stands in for a process that writes a checkpoint: writes in this one. A real one would outlive a killed rank."""

    def __init__(self, target: Callable[..., None], kwargs: Mapping[str, Any]) -> None:
        self.start = partial(target, **kwargs)

    def join(self) -> None: ...


filesystem_async._results_queue = queue.Queue()
_context = SimpleNamespace(Process=_Here, Queue=queue.Queue, JoinableQueue=queue.Queue)
filesystem_async.mp = SimpleNamespace(get_context=lambda _: _context)

_set_state = DistributedOptimizer._set_main_param_and_optimizer_states


def _set_all(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
    """Sets the optimizer state of a weight, and keeps values that `tensors` lacks. Megatron-Core 0.16.1 expects a step
    count of torch's AdamW for each weight."""
    _set_state(self, model_param, {**self._get_main_param_and_optimizer_states(model_param), **tensors})


DistributedOptimizer._set_main_param_and_optimizer_states = _set_all


class _Nothing:
    """Stands in for CUDA streams and events, and does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: self


class _OnHost(TorchFunctionMode):
    """Keeps tensors on the host that Megatron-Core would put on CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = HOST
        if func is torch.Tensor.to and len(args) > 1 and "cuda" in str(args[1]):
            args = (args[0], HOST, *args[2:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:  # gradients are asserted to be CUDA's by name
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


def _nothing(*_: Any, **__: Any) -> None: ...


def _as_numbers(value: Any, as_numpy: bool = False, **_: Any) -> Any:
    return value.numpy() if as_numpy and torch.is_tensor(value) else value


REPLACED: list[tuple[Any, str, Any]] = [
    (torch.cuda, "current_device", lambda: HOST),
    *(
        (torch.cuda, name, _nothing)
        for name in ("synchronize", "set_device", "empty_cache", "_lazy_init", "manual_seed")
    ),
    (torch.cuda, "_lazy_call", lambda call, **_: call()),
    *((torch.cuda, name, _Nothing) for name in ("Stream", "Event", "current_stream", "default_stream")),
    (torch.cuda, "stream", lambda _: nullcontext()),
    (torch.cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state()),
    (torch.cuda, "set_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
    *((torch.cuda.nvtx, name, _nothing) for name in ("range_push", "range_pop")),
    *((owner, "cuda", lambda self, *_, **__: self) for owner in (torch.Tensor, torch.nn.Module)),
    (random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
    (random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
    (token_dispatcher, "maybe_move_tensor_to_cpu", _as_numbers),
]


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Lets the calls of Megatron-Core in its block work on tensors of this device."""
    if device != HOST:
        yield
        return
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in REPLACED]
    try:
        for owner, name, value in REPLACED:
            setattr(owner, name, value)
        with torch.compiler.set_stance("force_eager"), _OnHost():  # Megatron-Core compiles small functions
            yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
