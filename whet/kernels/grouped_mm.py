# SPDX-License-Identifier: Apache-2.0
"""Matrix products of rows with the weights of their experts, for a transformers module of stacked experts.

Kernels for few rows round differently from kernels for many rows, and the number of an expert's rows depends on other
tokens. On a CPU each expert's rows are padded to a multiple of `MIN_ROWS`, so that results depend on no other token."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

MIN_ROWS = 16


def one_by_one(
    module: Any, rows: torch.Tensor, counts: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Applies one expert after another: rows [n, H] sorted by expert, counts of rows by expert [E] -> [n, H]."""
    outs, none = [], [None] * len(gate_up)
    gate_up, down = (gate_up.mT, down.mT) if module.is_transposed else (gate_up, down)
    biases = [module.gate_up_proj_bias.unbind(), module.down_proj_bias.unbind()] if module.has_bias else [none, none]
    # One unbind for all experts: the gradient is then one tensor instead of a sum over experts.
    layers = zip(gate_up.unbind(), biases[0], down.unbind(), biases[1], strict=True)
    for part, (first, first_bias, second, bias) in zip(rows.split(counts.tolist()), layers, strict=True):
        if len(part):
            whole = F.pad(part, (0, 0, 0, -len(part) % MIN_ROWS))
            outs.append(F.linear(module._apply_gate(F.linear(whole, first, first_bias)), second, bias)[: len(part)])
    return torch.cat(outs) if outs else rows + 0.0 * (gate_up.sum() + down.sum())


def grouped(
    module: Any, rows: torch.Tensor, counts: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Computes `one_by_one` with two grouped matrix products for all experts."""
    ends = counts.cumsum(0).int()
    inner = module._apply_gate(F.grouped_mm(rows.to(gate_up.dtype), gate_up.mT, offs=ends))
    return F.grouped_mm(inner, down.mT, offs=ends)


def same_for_each(module: Any, rows: torch.Tensor) -> torch.Tensor:
    """Computes only the shape of the result, for tensors without values: each expert gets as many rows as any other."""
    each = -(-len(rows) // (module.num_experts * MIN_ROWS)) * MIN_ROWS
    whole = F.pad(rows, (0, 0, 0, module.num_experts * each - len(rows)))
    up, down = module.gate_up_proj, module.down_proj
    up, down = (up, down) if module.is_transposed else (up.mT, down.mT)
    return (module._apply_gate(whole.view(module.num_experts, each, -1) @ up) @ down).flatten(0, 1)[: len(rows)]
