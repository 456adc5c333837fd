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
    special = module.has_bias or module.is_transposed or module.has_post_expert_norm or not module.has_gate
    if hidden_states.device.type != "cpu" or special:
        plain: torch.Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden_states, top_k_index, top_k_weights)
        return plain
    chosen, k = top_k_index.flatten(), top_k_index.shape[1]
    order = chosen.argsort(stable=True)  # (token, choice) pairs, sorted by expert
    if isinstance(chosen, FakeTensor):  # it has no values: assume the same number for each expert
        counts = [len(part) for part in torch.empty(len(chosen), device="meta").tensor_split(module.num_experts)]
    else:
        counts = chosen.bincount(minlength=module.num_experts).tolist()
    outs = []
    # One unbind for all experts: the gradient is then one tensor instead of a sum over experts.
    for pairs, gate_up, down in zip(
        order.split(counts), module.gate_up_proj.unbind(), module.down_proj.unbind(), strict=True
    ):
        if len(pairs):
            rows = F.pad(hidden_states[pairs // k], (0, 0, 0, -len(pairs) % MIN_ROWS))
            outs.append(F.linear(module._apply_gate(F.linear(rows, gate_up)), down)[: len(pairs)])
    weighted = torch.cat(outs)[order.argsort()] * top_k_weights.flatten()[:, None]
    return weighted.view(-1, k, hidden_states.shape[1]).sum(1).to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(NAME, experts)
