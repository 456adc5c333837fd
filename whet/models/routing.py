# SPDX-License-Identifier: Apache-2.0
"""Routing replay for mixtures of experts: a rollout records the experts of each token, and the trainer uses them again.

Ma et al. 2025 (R3), https://arxiv.org/abs/2510.11370: rounding may let two engines choose different experts, which
changes the token's probability far more than rounding itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from whet.models.experts import expert_modules

ARGUMENT = "routed"  # argument of a layer's forward pass: [T, layers with experts, k], -1: the router chooses
DTYPE = torch.int16


@contextmanager
def recording(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Yields a list. During the block, every layer with experts adds its router's chosen experts [T, k] to it."""
    chosen, experts = list[torch.Tensor](), [module for _, module in expert_modules(model)]
    handles = [each.register_forward_pre_hook(lambda _, args: chosen.append(args[1])) for each in experts]
    try:
        yield chosen
    finally:
        for handle in handles:
            handle.remove()


def as_bytes(chosen: list[torch.Tensor], keep: torch.Tensor | None) -> list[bytes]:
    """Encodes the experts of `recording` as int16 for each token (of `keep`, if given): k, [layers, k] experts."""
    table = torch.stack(chosen, 1)
    table = (table if keep is None else table[keep]).flatten(1)
    return [row.tobytes() for row in F.pad(table, (1, 0), value=chosen[0].shape[1]).to(DTYPE).numpy()]


def as_column(rows: Sequence[Sequence[bytes]], width: int) -> torch.Tensor | None:
    """Builds [B, width, layers, k] from rows of `as_bytes`; -1 for tokens without experts. None if no token has any."""
    some = next((np.frombuffer(each, np.int16) for row in rows for each in row if each), None)
    if some is None:
        return None
    column = torch.full((len(rows), width, len(some) - 1), -1, dtype=DTYPE)
    for number, row in enumerate(rows):
        places = [place for place, each in enumerate(row) if each]
        if places:
            found = np.frombuffer(b"".join(row), np.int16).reshape(len(places), -1)
            column[number, places] = torch.from_numpy(found[:, 1:].copy())
    return column.unflatten(-1, (-1, int(some[0])))


class _Replayed(TorchFunctionMode):
    """Replaces the result of `torch.topk` over the E experts by given experts and their values."""

    def __init__(self, chosen: torch.Tensor, num_experts: int) -> None:
        super().__init__()
        self._chosen, self._num_experts = chosen, num_experts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk) or args[0].shape[-1] != self._num_experts:
            return found
        if found.indices.shape != self._chosen.shape:  # this call chooses groups of experts
            return found
        indices = torch.where(self._chosen >= 0, self._chosen.long(), found.indices)
        return torch.return_types.topk((args[0].gather(-1, indices), indices))


def replay(layers: list[nn.Module]) -> None:
    """Makes layers use the experts in their forward pass's argument `routed`, by hooks, without changing modules."""
    mixtures = [(layer, found[0][1]) for layer in layers if (found := list(expert_modules(layer)))]
    for number, (layer, experts) in enumerate(mixtures):
        _hook(layer, number, experts.num_experts)


def _hook(layer: nn.Module, number: int, num_experts: int) -> None:
    modes: list[_Replayed | nullcontext[None]] = []

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        routed = kwargs.pop(ARGUMENT, None)
        if routed is not None:
            modes.append(_Replayed(routed[:, number], num_experts))
            modes[-1].__enter__()
        return args, kwargs

    def after(module: nn.Module, args: Any, result: Any) -> None:
        if modes:
            modes.pop().__exit__(None, None, None)

    layer.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
    layer.register_forward_hook(after, always_call=True)
    own, name = vars(layer), "_gradient_checkpointing_func"
    if name in own:  # the backward pass repeats the layer's forward without its hooks
        own[name] = partial(own[name], context_fn=lambda: (nullcontext(), *(modes or [nullcontext()])))
