# SPDX-License-Identifier: Apache-2.0
"""The reference training engine: each process has the whole model."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from whet import serialization
from whet.config.algorithm_checks import EngineUse
from whet.devices import HOST
from whet.engines.engine import Engine, check_same
from whet.engines.optim import SavedTensor, check_form, form_of, optimizer_for, restore
from whet.engines.role import RoleSettings
from whet.errors import ConfigError, EngineError
from whet.kernels.bfloat16_copies import NarrowCopies
from whet.kernels.compiled_layers import compile_layers
from whet.models.batch_invariant import KEY, fix_tiles
from whet.models.load import body_of, cast_weights, layers
from whet.models.outputs import outputs_of
from whet.models.packing import Layout
from whet.options import NonNegative
from whet.registry import register_engine


@register_engine("single")
class SingleEngine(Engine):
    """The whole model on every rank, each with its own shard of a mini-batch.

    compile: compiles the layers: a slower start, faster steps. Unset: in bfloat16 on an accelerator.
    router_bias_rate: step by which an update moves each expert's bias in the routers of DeepSeek-V3, GLM-4.5 and
        others: up if fewer tokens than the mean chose the expert, else down. In DeepSeek-V3's pretraining 0.001, and 0
        at its end.
    """

    def __init__(
        self,
        role: RoleSettings,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device = HOST,
        *,
        compile: bool | None = None,  # noqa: A002  # the option's name
        router_bias_rate: NonNegative = 0.0,
    ) -> None:
        super().__init__(nn.Module.to(role.whole_model(), device), role, process_group, device, router_bias_rate)
        if role.optim is not None and role.optim.weight_rounding is not None:
            cast_weights(self.model, torch.bfloat16)
            for weight in self.model.parameters():
                weight.grad_dtype = torch.float32  # gradients of micro-batches are summed up in float32
        is_narrow = device != HOST and role.forward.dtype == torch.bfloat16
        if is_narrow and not role.batch_invariant if compile is None else compile:
            compile_layers(layers(body_of(self.model)))
        self.narrow = NarrowCopies(layers(body_of(self.model))) if is_narrow else None
        if role.batch_invariant:
            if compile or not role.forward.packing:
                found = "needs packed rows and layers that are not compiled"
                change = "unset actor.engine.options.compile and actor.engine.packing"
                raise EngineError(f"{KEY}=true", found, "", change)
            tile = fix_tiles(body_of(self.model), device, role.forward.dtype)
            self.forward_settings = replace(self.forward_settings, in_stretches=True, tile=tile)
        self.optimizer = optimizer_for(self.model, role.optim, role.seed) if role.optim is not None else None

    @classmethod
    def refuses(cls, use: EngineUse) -> Iterable[ConfigError]:
        """Returns no errors: unlike other engines, `single` supports the kernels of a batch-invariant rollout."""
        return ()

    def whole_module(self) -> PreTrainedModel | None:
        """Returns the language model or reward model itself; None for a value model."""
        return self.model if isinstance(self.model, PreTrainedModel) else None

    def state(self) -> dict[str, Any]:
        """Returns weights (with an adapter only the adapter's), optimizer state, numbers of steps taken and skipped."""
        state: dict[str, Any] = {
            "model": {name: parameter.detach() for name, parameter in self._checkpointed().items()},
            **self._progress(),
        }
        return state if self.optimizer is None else {**state, "optimizer": self.optimizer.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores the state that `state` returned.  Raises: EngineError, which names the missing, unknown and
        differing weights."""
        own = self._checkpointed()
        if not all(map(torch.is_tensor, state["model"].values())):
            raise TypeError("not all weights are tensors")
        check_same({name: p.shape for name, p in own.items()}, {name: w.shape for name, w in state["model"].items()})
        saved: dict[str, Any] = state["optimizer"] if self.optimizer is not None else {}
        parts = [saved] if "state" in saved else saved.values()
        values = [(name, value) for part in parts for each in part["state"].values() for name, value in each.items()]
        found = [SavedTensor(name, value.dtype, value.shape) for name, value in values if torch.is_tensor(value)]
        check_form(state.get("optim"), form_of(self.role.optim), found, {w.dtype for w in state["model"].values()})
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(state["model"][name])
        self._load_progress(state)
        if self.optimizer is not None:
            is_numbers = all(isinstance(value, torch.Tensor | int | float) for _, value in values)
            if not is_numbers or not serialization.fits(saved, self.optimizer.state_dict()):
                raise TypeError("the optimizer's state has other values than numbers and tensors")
            # torch keeps the tensors that it gets. Mapped from the file, they would keep it on the disk when deleted.
            restore(self.optimizer, copy.deepcopy(saved))

    def save(self, path: Path, start: dict[str, Any] | None) -> None:
        """Writes one file, on the first rank."""
        if self.dp_rank == 0:
            serialization.save(path, {**self.state(), "start": start})

    def load(self, path: Path) -> dict[str, Any] | None:
        if path.is_dir():
            change = "set engine.name to the engine of the run that wrote it"
            raise EngineError(f"{path}", "is a folder", "a file, which this engine writes", change)
        state = serialization.load(path)
        self.load_state(state)
        start: dict[str, Any] | None = state.get("start")
        return start

    def _outputs(self, where: Layout, needs: frozenset[str], temperature: float) -> dict[str, torch.Tensor]:
        return outputs_of(self.model, where, needs, self.forward_settings, temperature)

    def _weights_read(self) -> AbstractContextManager[None]:
        return nullcontext() if self.narrow is None else self.narrow.used()

    def offload(self, weights: bool = True) -> None:
        if self.narrow is not None:
            self.narrow.forget()
        super().offload(weights)

    def _sum_gradients(self) -> None:
        """Sums gradients over the ranks in one flat tensor. A rank without rows sends zeros."""
        if self.process_group is None:
            return
        parameters = self._trained()
        flat = torch.cat(
            [(p.new_zeros(p.shape, dtype=torch.float32) if p.grad is None else p.grad).flatten() for p in parameters]
        )
        dist.all_reduce(flat, group=self.process_group)
        for parameter, grad in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = grad.view_as(parameter)

    def _clip(self) -> torch.Tensor:
        """Clips the gradient.  Returns its norm before clipping."""
        with_grad = [p for p in self.model.parameters() if p.grad is not None]
        return torch.nn.utils.clip_grad_norm_(with_grad, self.grad_clip if self.grad_clip is not None else float("inf"))
