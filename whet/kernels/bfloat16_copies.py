# SPDX-License-Identifier: Apache-2.0
"""Copies the weights of linear layers to bfloat16 once for all passes of an update, instead of a cast in each pass.

The weights stay float32. Matrix products read the copy. Its gradient is added in float32 to the weight's gradient."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from whet.kernels.linear import FastLinear


class NarrowLinear(nn.Linear):
    """A linear layer whose matrix product reads bfloat16 copies of weight and bias, if copies exist."""

    narrow: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # torch's name
        """Computes the layer: [..., in] -> [..., out]."""
        weight, bias = (self.weight, self.bias) if self.narrow is None else self.narrow
        return F.linear(input, weight, bias)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Linear:
        """Returns a plain linear layer, because a copy of the model does not need the bfloat16 copies."""
        plain = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        for name, parameter in self._parameters.items():
            plain._parameters[name] = copy.deepcopy(parameter, memo)
        return plain.train(self.training)


class NarrowCopies:
    """The bfloat16 copies of all linear layers in some modules. They are made when they are first needed."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._linear = list(_replaced(modules))
        self._narrow: dict[NarrowLinear, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._version: tuple[int, ...] = ()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Makes linear layers read copies of their weights during the block. Copies are updated at its beginning."""
        if not self._copies:
            self._make()
        masters, copies = zip(*self._copies, strict=True) if self._copies else ((), ())
        version = tuple(weight._version for weight in masters)
        if version and version != self._version:
            with torch.no_grad():
                torch._foreach_copy_(list(copies), list(masters))
            self._version = version
        for layer, narrow in self._narrow.items():
            layer.narrow = narrow
        try:
            yield
        finally:
            for layer in self._narrow:
                layer.narrow = None

    def forget(self) -> None:
        """Frees the copies."""
        self._copies, self._version, self._narrow = [], (), {}

    def _make(self) -> None:
        for layer in self._linear:
            self._narrow[layer] = self._copy(layer.weight), None if layer.bias is None else self._copy(layer.bias)

    def _copy(self, weight: torch.Tensor) -> torch.Tensor:
        narrow = torch.empty_like(weight, dtype=torch.bfloat16, requires_grad=weight.requires_grad)
        self._copies.append((weight, narrow))
        if weight.requires_grad:
            narrow.register_post_accumulate_grad_hook(partial(_add_gradient, weight))
        return narrow


def _add_gradient(weight: torch.Tensor, narrow: torch.Tensor) -> None:
    """Adds the gradient of a copy to the gradient of its weight, and clears the copy's gradient."""
    assert narrow.grad is not None
    if weight.grad is None:
        weight.grad = narrow.grad.float()
    else:
        weight.grad += narrow.grad
    narrow.grad = None


def _is_plain(layer: nn.Linear) -> bool:
    return type(layer) in (nn.Linear, FastLinear) and layer.weight.dtype == torch.float32


def _replaced(modules: Iterable[nn.Module]) -> Iterator[NarrowLinear]:
    """Replaces each linear layer with float32 weights by a `NarrowLinear`; the weights stay the same."""
    for module in modules:
        for parent in list(module.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear) and _is_plain(child):
                    narrow = NarrowLinear(child.in_features, child.out_features, child.bias is not None, device="meta")
                    narrow._parameters = child._parameters
                    setattr(parent, name, narrow.train(child.training))
                    yield narrow
