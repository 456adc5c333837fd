# SPDX-License-Identifier: Apache-2.0
"""Sequence parallelism: each rank has a part of the tokens; in attention it has all tokens and a part of the heads.

Jacobs et al. 2023 (Ulysses), https://arxiv.org/abs/2309.14509. A layer has two exchanges, before and after attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from whet.errors import ConfigError

KEY = "engine.options.sequence_parallel_size"
SUPPORTED = {"full_attention", "sliding_attention"}  # layer types in which only attention mixes tokens


@dataclass(frozen=True)
class TokenShare:
    """The split of tokens over the ranks of `group`, in equal consecutive parts."""

    group: dist.ProcessGroup

    @property
    def size(self) -> int:
        """Number of ranks."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """Number of this rank's part."""
        return dist.get_rank(self.group)

    def padded(self, count: int) -> int:
        """`count`, rounded up to a multiple of the number of ranks."""
        return -(-count // self.size) * self.size

    def own(self, tokens: torch.Tensor) -> torch.Tensor:
        """Part of this rank: [..., T] -> [..., T / size]."""
        return tokens.unflatten(-1, (self.size, -1))[..., self.rank, :]

    def to_heads(self, states: torch.Tensor) -> torch.Tensor:
        """[1, H, T / size, D] -> [1, H / size, T, D]; fewer heads than ranks are repeated first."""
        if (heads := states.shape[1]) < self.size:
            states = states.repeat_interleave(self.size // heads, dim=1)
        parts = states[0].unflatten(0, (self.size, -1))  # [size, H / size, T / size, D]
        return _exchange(parts, self.group).transpose(0, 1).flatten(1, 2)[None]

    def to_tokens(self, states: torch.Tensor) -> torch.Tensor:
        """[1, T, H / size, D] -> [1, T / size, H, D]."""
        parts = states[0].unflatten(0, (self.size, -1))  # [size, T / size, H / size, D]
        return _exchange(parts, self.group).transpose(0, 1).flatten(1, 2)[None]

    def gather(self, own: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
        """Gathers the values of N tokens from all ranks, [n, ...] -> [N, ...]; `owner` [N] is the rank of each token,
        and a rank's values are in token order. Differentiable where all ranks compute the same from the result."""
        counts = owner.bincount(minlength=self.size)
        most = int(counts.max()) if len(owner) else 0
        padding = [0, 0] * (own.dim() - 1) + [0, most - len(own)]
        everyone = _Gather.apply(F.pad(own, padding), self.group)  # [size, most, ...]
        order = owner.argsort(stable=True)
        first = counts.cumsum(0) - counts
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device) - first[owner[order]]
        return everyone[owner, place]


def check_heads(config: Any, size: int) -> None:
    """Checks that a model's heads and layers allow a split over `size` ranks.  Raises: ConfigError."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    valid = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    if size not in valid:
        expected = f"a divisor of {heads} heads and {kv_heads} key-value heads"
        raise ConfigError(KEY, size, expected, f"try {', '.join(str(each) for each in valid)}")
    if others := sorted(set(getattr(config, "layer_types", None) or ()) - SUPPORTED):
        expected = f"layers in which only attention mixes tokens, and this model has {', '.join(others)}"
        raise ConfigError(KEY, size, expected, "set it to 1")


def _exchange(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchanges [size, ...] by all-to-all: part r goes to rank r, and index r holds rank r's part; differentiable."""
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
        ctx.rank = dist.get_rank(group)
        everyone = own.new_empty(dist.get_world_size(group), *own.shape)
        dist.all_gather(list(everyone.unbind()), own.contiguous(), group=group)
        return everyone

    @staticmethod
    def backward(ctx, grad: torch.Tensor):  # type: ignore[no-untyped-def]
        return grad[ctx.rank], None
