# SPDX-License-Identifier: Apache-2.0
"""whet's mixture of experts for transformers models. On a CPU, a token's result does not depend on other tokens
(explained in `whet/kernels/grouped_mm.py`). Experts may be on several ranks (`ExpertShare`); then the hidden states of
tokens are sent to the ranks of their experts and back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from whet.kernels.grouped_mm import grouped, one_by_one, same_for_each

NAME = "whet"
SHARE = "whet_share"  # the attribute with the `ExpertShare` of a module whose experts are on several ranks


@dataclass(frozen=True)
class ExpertShare:
    """The split of E experts over ranks: first over the ranks of `group`, which have different tokens, then over the
    ranks of `tensor_group`, which have the same tokens."""

    group: dist.ProcessGroup
    tensor_group: dist.ProcessGroup | None


def implementation() -> str:
    """Returns the value of `experts_implementation` for whet's experts, which transformers then knows by name."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts)
    return NAME


def experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Computes the experts: hidden states [T, H], each token's k experts [T, k] and their weights [T, k] -> [T, H]."""
    share: ExpertShare | None = getattr(module, SHARE, None)
    if share is not None:
        return _shared(module, hidden_states, top_k_index, top_k_weights, share)
    if hidden_states.device.type != "cpu" or module.has_post_expert_norm or not module.has_gate:
        plain: torch.Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden_states, top_k_index, top_k_weights)
        return plain
    chosen, k = top_k_index.flatten(), top_k_index.shape[1]
    order = chosen.argsort(stable=True)  # (token, choice) pairs, sorted by expert
    rows = hidden_states[order // k]
    if isinstance(chosen, FakeTensor):
        out = same_for_each(module, rows)
    else:
        counts = chosen.bincount(minlength=module.num_experts)
        out = one_by_one(module, rows, counts, module.gate_up_proj, module.down_proj)
    weighted = out[order.argsort()] * top_k_weights.flatten()[:, None]
    return weighted.view(-1, k, hidden_states.shape[1]).sum(1).to(hidden_states.dtype)


def is_special(module: Any) -> bool:
    """Tells whether transformers computes these experts with more than two matrix products and a gate."""
    return bool(module.has_bias or module.is_transposed or module.has_post_expert_norm or not module.has_gate)


def expert_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the modules with stacked experts [E, ...], by name."""
    for name, module in model.named_modules():
        # transformers' decorator sets the first attribute
        if hasattr(module, "has_post_expert_norm") and hasattr(module, "num_experts"):
            yield name, module


def _shared(
    module: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, share: ExpertShare
) -> torch.Tensor:
    """Computes `experts` if this rank has n of the E experts. Rows are sent to the ranks of their experts, and back."""
    size, same = share.group.size(), share.tensor_group
    gate_up, down = module.gate_up_proj.to_local(), module.down_proj.to_local()
    n, k = gate_up.shape[0], chosen.shape[1]
    pairs, places = chosen.flatten(), 1 if same is None else same.size()
    if same is not None:
        hidden, weights = _SummedGradient.apply(hidden, same), _SummedGradient.apply(weights, same)
        is_own = pairs // n % places == dist.get_rank(same)
        pairs = torch.where(is_own, pairs, module.num_experts)
    order = pairs.argsort(stable=True)
    counts = pairs.bincount(minlength=module.num_experts + 1)[: module.num_experts]
    order = order[: int(counts.sum())]
    sent = counts.view(size, places, n)[:, 0 if same is None else dist.get_rank(same)].contiguous()  # [size, n]
    coming = torch.empty_like(sent)
    dist.all_to_all_single(coming, sent, group=share.group)
    to, back = sent.sum(1).tolist(), coming.sum(1).tolist()
    rows = _Rows.apply(hidden[order // k], to, back, share.group)
    kind = torch.arange(n, device=rows.device).repeat(size).repeat_interleave(coming.flatten())
    by_expert = kind.argsort(stable=True)
    compute = one_by_one if rows.device.type == "cpu" else grouped
    out = compute(module, rows[by_expert], coming.sum(0), gate_up, down)[by_expert.argsort()]
    returned = _Rows.apply(out, back, to, share.group)
    whole = returned.new_zeros(chosen.numel(), hidden.shape[1]).index_copy(0, order, returned)
    result = (whole * weights.flatten()[:, None]).view(-1, k, hidden.shape[1]).sum(1).to(hidden.dtype)
    return result if same is None else _Sum.apply(result, same)


class _Rows(torch.autograd.Function):
    """Exchanges rows [n, H] by all-to-all. `to` has the number of rows sent to each rank, `back` the number received
    from each rank."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, rows: torch.Tensor, to: list[int], back: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.way = back, to, group
        received = rows.new_empty(sum(back), rows.shape[1])
        dist.all_to_all_single(received, rows.contiguous(), back, to, group=group)
        return received

    @staticmethod
    def backward(ctx, grad: torch.Tensor):  # type: ignore[no-untyped-def]
        return _Rows.apply(grad, *ctx.way), None, None, None


class _SummedGradient(torch.autograd.Function):
    """Returns the tensor unchanged. Sums its gradient over ranks, because each rank computes a part of the result."""

    @staticmethod
    def forward(ctx, whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # type: ignore[no-untyped-def]
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):  # type: ignore[no-untyped-def]
        summed = grad.contiguous().clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


class _Sum(torch.autograd.Function):
    """Sums a tensor over ranks. Its gradient is not summed, because all ranks compute the same from the sum."""

    @staticmethod
    def forward(ctx, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # type: ignore[no-untyped-def]
        summed = part.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx, grad: torch.Tensor):  # type: ignore[no-untyped-def]
        return grad, None
