# SPDX-License-Identifier: Apache-2.0
"""whet's mixture of experts for transformers models: on a CPU a token's result does not depend on the other tokens.

Kernels for few rows round differently from those for many, and the other tokens decide how many rows an expert gets.
So an expert's rows are padded to at least `MIN_ROWS`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

NAME = "whet"
MIN_ROWS = 16


def experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """hidden states [T, H], the k experts of each token [T, k] and their weights [T, k] -> [T, H]."""
    special = module.has_post_expert_norm or not module.has_gate
    if hidden_states.device.type != "cpu" or special:
        plain: torch.Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden_states, top_k_index, top_k_weights)
        return plain
    chosen, k = top_k_index.flatten(), top_k_index.shape[1]
    order = chosen.argsort(stable=True)  # (token, choice) pairs, sorted by expert
    apply = _same_for_each if isinstance(chosen, FakeTensor) else _one_by_one
    out = apply(module, hidden_states, order // k, chosen)
    weighted = out[order.argsort()] * top_k_weights.flatten()[:, None]
    return weighted.view(-1, k, hidden_states.shape[1]).sum(1).to(hidden_states.dtype)


def _one_by_one(module: Any, hidden_states: torch.Tensor, tokens: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    counts, outs = chosen.bincount(minlength=module.num_experts).tolist(), []
    gates, downs = _layers(module)
    # One unbind for all experts: the gradient is then one tensor instead of a sum over experts.
    for part, *gate_up, down, bias in zip(tokens.split(counts), *gates, *downs, strict=True):
        if len(part):
            rows = F.pad(hidden_states[part], (0, 0, 0, -len(part) % MIN_ROWS))
            outs.append(F.linear(module._apply_gate(F.linear(rows, *gate_up)), down, bias)[: len(part)])
    return torch.cat(outs)


def _layers(module: Any) -> tuple[tuple[Any, Any], ...]:
    """Weights [N, K] and biases [N] or None of the experts, of both of their layers."""
    pairs = []
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(module, name)
        biases = getattr(module, f"{name}_bias").unbind() if module.has_bias else [None] * module.num_experts
        pairs.append(((weight.mT if module.is_transposed else weight).unbind(), biases))
    return tuple(pairs)


def _same_for_each(
    module: Any, hidden_states: torch.Tensor, tokens: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """The shapes alone, for tensors without values: each expert gets the same number of rows."""
    each = -(-len(tokens) // (module.num_experts * MIN_ROWS)) * MIN_ROWS
    rows = F.pad(hidden_states[tokens], (0, 0, 0, module.num_experts * each - len(tokens)))
    up, down = module.gate_up_proj, module.down_proj
    up, down = (up, down) if module.is_transposed else (up.mT, down.mT)
    inner = module._apply_gate(rows.view(module.num_experts, each, -1) @ up)
    return (inner @ down).flatten(0, 1)[: len(tokens)]


ALL_EXPERTS_FUNCTIONS.register(NAME, experts)
