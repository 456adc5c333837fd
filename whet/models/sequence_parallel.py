# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: each rank has a part of the tokens with all heads; in attention, more tokens but fewer heads.

Jacobs et al. 2023 (Ulysses), https://arxiv.org/abs/2309.14509. A layer has two exchanges, before and after attention.
With more ranks than heads, keys and values are gathered too, as in Llama 3 (2024), https://arxiv.org/abs/2407.21783."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from whet.errors import ConfigError
from whet.kernels.varlen_attention import TOKENS_STEP, rounded
from whet.models.caches import attention_heads, key_value_heads

KEY = "engine.options.mesh.context"
SUPPORTED = {"full_attention", "sliding_attention"}  # layer types in which only attention mixes tokens


@dataclass(frozen=True)
class TokenShare:
    """The split of tokens over the ranks of `group`, in equal parts.

    The ranks form a grid of `rings` rows with `heads` ranks each. In attention the ranks of a row exchange their tokens
    for heads, and gather the keys and values of other rows. A row of ranks has a part of the first half of the tokens
    and a part of the second half, so that all rows compute about as many (query, key) pairs under the causal mask."""

    group: dist.ProcessGroup
    heads_group: dist.ProcessGroup
    ring_group: dist.ProcessGroup

    @property
    def size(self) -> int:
        """The number of ranks."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """The number of this rank's part."""
        return dist.get_rank(self.group)

    @property
    def rings(self) -> int:
        """The number of rows of ranks, between which keys and values are gathered."""
        return dist.get_world_size(self.ring_group)

    def padded(self, count: int) -> int:
        """Rounds `count` up so that all ranks get equal parts."""
        step = self.size if self.rings == 1 else 2 * self.size
        return -(-count // step) * step

    def order(self, total: int, device: torch.device) -> torch.Tensor:
        """Returns the indices of each rank's tokens, [size, total / size]."""
        halves = torch.arange(total, device=device).view(2 * self.rings, -1) if self.rings > 1 else None
        if halves is None:
            return torch.arange(total, device=device).view(self.size, -1)
        return torch.cat([halves[: self.rings], halves[self.rings :].flip(0)], 1).view(self.size, -1)

    def places(self, total: int, device: torch.device) -> torch.Tensor:
        """Returns each token's index in the concatenated tokens of all ranks, [total]."""
        return self.order(total, device).flatten().argsort()

    def ring(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the indices of this row of ranks' tokens (of `count`), and of each token after `gather_rings`."""
        total, host = self.padded(rounded(count, TOKENS_STEP)), torch.device("cpu")
        tokens = self.order(total, host).view(self.rings, -1)[dist.get_rank(self.ring_group)]
        return tokens[tokens < count], self.places(total, host)

    def own(self, tokens: torch.Tensor) -> torch.Tensor:
        """Selects this rank's part: [..., T] -> [..., T / size]."""
        return tokens[..., self.order(tokens.shape[-1], tokens.device)[self.rank]]

    def gather_rings(self, states: torch.Tensor) -> torch.Tensor:
        """Gathers and concatenates the states of all rows of ranks: [T / rings, ...] -> [T, ...]; differentiable."""
        gathered: torch.Tensor = _GatherParts.apply(states, self.ring_group)
        return gathered.flatten(0, 1)

    def to_heads(self, states: torch.Tensor) -> torch.Tensor:
        """Exchanges tokens for heads: [1, H, T / size, D] -> [1, H / heads, T / rings, D]; H < heads: heads repeat."""
        heads = dist.get_world_size(self.heads_group)
        if (count := states.shape[1]) < heads:
            states = states.repeat_interleave(heads // count, dim=1)
        return self.to_tokens(states)  # the same exchange: each part [H / heads, T / size, D] goes to one rank

    def own_heads(self, numbers: torch.Tensor) -> torch.Tensor:
        """Selects the heads that this rank computes in attention: [H] -> [H / heads]."""
        return numbers.chunk(dist.get_world_size(self.heads_group))[dist.get_rank(self.heads_group)]

    def to_tokens(self, states: torch.Tensor) -> torch.Tensor:
        """Exchanges heads for tokens: [1, T / rings, H / heads, D] -> [1, T / size, H, D]."""
        heads = dist.get_world_size(self.heads_group)
        parts = states[0].unflatten(0, (heads, -1))  # [heads, T / size, H / heads, D]
        return _exchange(parts, self.heads_group).transpose(0, 1).flatten(1, 2)[None]

    def gather(self, own: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
        """Gathers the values of N tokens from all ranks: [n, ...] -> [N, ...]. `owner` [N] is the rank of each token; a
        rank's values are in token order. Differentiable; all ranks must compute the same from the result."""
        counts = owner.bincount(minlength=self.size)
        most = int(counts.max()) if len(owner) else 0
        padding = [0, 0] * (own.dim() - 1) + [0, most - len(own)]
        everyone = _Gather.apply(F.pad(own, padding), self.group)  # [size, most, ...]
        order = owner.argsort(stable=True)
        first = counts.cumsum(0) - counts
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device) - first[owner[order]]
        return everyone[owner, place]


def heads_ranks(config: Any, size: int, tensor: int = 1) -> int:
    """Returns the largest divisor of `size` over which sequence parallelism can split the attention heads of one of
    `tensor` tensor-parallel ranks.  Raises: ConfigError for layers that mix tokens outside of attention."""
    heads, kv_heads = attention_heads(config) // tensor, key_value_heads(config) // tensor
    if others := sorted(set(getattr(config, "layer_types", None) or ()) - SUPPORTED):
        expected = f"layers in which only attention mixes tokens, and this model has {', '.join(others)}"
        raise ConfigError(KEY, size, expected, "set it to 1")
    valid = (n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0))
    return max(n for n in valid if size % n == 0)


def _exchange(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchanges [size, ...] by all-to-all: part r goes to rank r, and a part of rank r replaces it; differentiable."""
    exchanged: torch.Tensor = _Exchange.apply(parts, group)
    return exchanged


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # type: ignore[no-untyped-def]
        ctx.group = group
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx, grad: torch.Tensor):  # type: ignore[no-untyped-def]
        return _Exchange.apply(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    """Gathers [...] -> [size, ...]. The gradient is this rank's slice, because all ranks compute the same loss."""

    @staticmethod
    def forward(ctx, own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # type: ignore[no-untyped-def]
        ctx.group = group
        everyone = own.new_empty(dist.get_world_size(group), *own.shape)
        dist.all_gather(list(everyone.unbind()), own.contiguous(), group=group)
        return everyone

    @staticmethod
    def backward(ctx, grad: torch.Tensor):  # type: ignore[no-untyped-def]
        return grad[dist.get_rank(ctx.group)], None


class _GatherParts(_Gather):
    """Gathers like `_Gather`. Sums each rank's gradient over all ranks, because they compute different results."""

    @staticmethod
    def backward(ctx, grad: torch.Tensor):  # type: ignore[no-untyped-def]
        wide = torch.promote_types(grad.dtype, torch.float32)
        return _exchange(grad, ctx.group).sum(0, dtype=wide).to(grad.dtype), None
