# SPDX-License-Identifier: Apache-2.0
"""Linear attention (the gated delta rule, https://arxiv.org/abs/2412.06464) over packed rows and over requests.

transformers' module computes everything except the two operations that mix tokens, a short causal convolution and the
delta rule. A `TokenFlow` computes these two: it knows each token's predecessor, and the state at the start of each
sequence."""

from __future__ import annotations

import inspect
from functools import cache, wraps
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import nn
from transformers.activations import ACT2FN

from whet.kernels.delta_rule import Rule

CONVOLUTION, RULE, STEPS = "causal_conv1d_fn", "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"
OURS = set[Any]()  # classes of modules that follow a flow


class TokenFlow(Protocol):
    """Computes the two operations that mix tokens, for T tokens of several sequences, stored one after another."""

    def convolve(self, layer: int, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Sums weight [C, K] times the inputs of each token and the K - 1 tokens before it: [T, C] -> [T, C]."""

    def scan(self, layer: int, rule: Rule, steps: Rule, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Applies the delta rule, by chunks or step by step, to query and key [T, KH, K], value [T, VH, V], log decay
        and rate [T, VH].   -> [T, VH, V]"""


def is_followed(module: nn.Module) -> bool:
    """Tells whether a transformers module is linear attention in which only these two operations mix tokens."""
    return {CONVOLUTION, RULE} <= {*inspect.unwrap(type(module).forward).__code__.co_names}


def follow_rows(model: nn.Module) -> None:
    """Makes the model's linear attention follow the argument `packed` or `paged` of a pass; weights and names stay."""
    for module in model.modules():
        kind: Any = type(module)
        if is_followed(module) and kind not in OURS:
            module.__class__ = _following(kind)


@cache
def _following(kind: Any) -> Any:
    """Returns a subclass of a transformers class, whose forward calls the two operations of a `TokenFlow`."""
    plain: Any = inspect.unwrap(kind.forward)
    rule, steps = plain.__globals__[RULE], plain.__globals__[STEPS]

    @torch.compiler.disable
    def convolve(x: torch.Tensor, weight: torch.Tensor, bias: Any = None, activation: Any = None, **how: Any) -> Any:
        """Replaces transformers' convolution: [1, C, T] -> [1, C, T]."""
        out = how["flow"].convolve(how["layer"], x[0].T, weight)
        out = out if bias is None else out + bias
        return (out if activation is None else ACT2FN[activation](out)).to(x.dtype).T[None]

    @torch.compiler.disable
    def scan(query: Any, key: Any, value: Any, g: Any, beta: Any, **how: Any) -> tuple[torch.Tensor, None]:
        """Replaces transformers' delta rule: [1, T, ...] -> [1, T, VH, V]."""
        inputs = tuple(each[0] for each in (query, key, value, g, beta))
        return how["flow"].scan(how["layer"], rule, steps, inputs)[None], None

    names = {**plain.__globals__, CONVOLUTION: convolve, RULE: scan}
    ours: Any = FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)

    @wraps(plain)
    def forward(self: Any, *args: Any, packed: Any = None, paged: Any = None, **kwargs: Any) -> Any:
        if packed is None and paged is None:
            return kind.forward(self, *args, **kwargs)
        flow = packed.flow if paged is None else paged.flow
        return ours(self, *args, **kwargs, flow=flow, layer=self.layer_idx)

    found = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    OURS.add(found)
    return found
