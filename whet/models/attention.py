# SPDX-License-Identifier: Apache-2.0
"""whet's attention for transformers models: one interface to train on packed rows and to decode from a block cache.

A model loaded with `attn_implementation="whet"` gets no mask from transformers. A keyword of the model's forward
selects the form: `packed=Layout` (concatenated rows), `paged=PagedContext` (a block KV cache), or neither (each row
from the left edge, padding on its right). All forms are without dropout and causal, except in the spans of a
packed layout that attend in both directions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from whet.kernels.attention import Scores, causal, widened
from whet.kernels.packed_attention import packed_attention
from whet.kernels.varlen_attention import Stretches, has_kernel, varlen_attention
from whet.models.caches import head_size
from whet.models.latent import absorbed, take_latents
from whet.models.linear_attention import TokenFlow
from whet.models.packing import Layout
from whet.models.sequence_parallel import TokenShare

NAME = "whet"
LONGEST_HEAD = 256  # numbers of a head that FlashAttention takes


def implementation(config: Any) -> str | dict[str, str]:
    """Returns the value of `attn_implementation` for a model with this transformers config: whet's attention for the
    text, which transformers then knows by name, torch's for a vision tower, whose tokens attend in both directions."""
    AttentionInterface.register(NAME, attention)
    if config.get_text_config() is config:
        return NAME
    return {"text_config": NAME, **{name: "sdpa" for name in config.sub_configs if name != "text_config"}}


def takes_one_call(config: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """Tells whether one call of FlashAttention computes a layer's attention over packed rows, for a model with this
    text config."""
    return fits_one_call(config, dtype) and has_kernel(device)


def fits_one_call(config: Any, dtype: torch.dtype) -> bool:
    """Tells whether FlashAttention supports a model: bfloat16, heads of 8, 16, ... or 256 numbers, no cap on scores."""
    size, cap = head_size(config), config.to_dict().get("attn_logit_softcapping")
    return dtype == torch.bfloat16 and not cap and size <= LONGEST_HEAD and size % 8 == 0


class PagedContext(Protocol):
    """The interface of the argument `paged=`: the rollout engine's access to its block cache during a forward pass."""

    flow: TokenFlow | None  # of models with linear attention

    @property
    def compiles(self) -> bool:
        """Tells whether compiled layers can use this context; if so, each gets its own by `layer`."""

    def layer(self, number: int) -> PagedContext:
        """Returns the context for one layer."""

    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        """Stores key and value in the cache and attends: [T, H, D], [T, KV, D], [T, KV, V] -> [T, H, V]."""


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed: Layout | None = None,
    paged: PagedContext | None = None,
    token_share: TokenShare | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention, called by transformers: [b, H, T, D], [b, KV, T, D], [b, KV, T, V] -> [b, T, H, V]."""
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    scores, latents = Scores(scale, sliding_window or 0, softcap or 0.0, s_aux), take_latents(module)
    if paged is not None:
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        if latents is None:
            return paged.attend(module, query, key, value, scores)[None], None
        query, key, value, to_value = absorbed(module, latents, query, key, value)
        out = paged.attend(module, query, key, value, scores)
        return torch.einsum("thr,hvr->thv", out, to_value)[None], None
    if packed is None:
        return causal(query, key, value, scores, None).transpose(1, 2).contiguous(), None
    device = query.device.type
    if torch.is_autocast_enabled(device):  # cast once, instead of for every bunch
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    if token_share is not None:
        query, key, value = (token_share.to_heads(x) for x in (query, key, value))
        scores = scores if s_aux is None else scores._replace(sinks=token_share.own_heads(s_aux))
        if packed.ring_order is not None:
            return token_share.to_tokens(_in_ring(query, key, value, scores, packed, token_share)), None
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    if packed.stretches is None:
        real = len(packed.input_ids)
        out = packed_attention(query[:real], key[:real], value[:real], scores, packed)
    else:
        real = packed.stretches.size
        out = _in_one_call(query[:real], key[:real], value[:real], scores, packed.stretches)
    if real < len(query):
        out = torch.cat([out, out.new_zeros(len(query) - real, *out.shape[1:])])
    return out[None] if token_share is None else token_share.to_tokens(out[None]), None


def _in_one_call(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores, where: Stretches
) -> torch.Tensor:
    """Computes attention of all rows in one kernel call: [T, H, D], [K, KV, D], [K, KV, V] -> [T, H, V]."""
    size, wide = value.shape[2], widened(value, key.shape[2])
    return varlen_attention(query, key, wide, where, scores.scale, scores.window, scores.sinks)[..., :size]


@torch.compiler.disable
def _in_ring(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores, packed: Layout, share: TokenShare
) -> torch.Tensor:
    """Gathers keys of all rows of ranks, and attends: [1, H, n, D], [1, KV, n, D], [1, KV, n, V] -> [1, n, H, V]."""
    assert packed.ring_order is not None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    everyone, own = share.gather_rings(torch.cat([k, v], -1)), packed.ring_order
    if not len(own):  # these ranks have only padding
        return (q[..., :1].expand(-1, -1, v.shape[2]) * 0.0 + everyone.sum() * 0.0)[None]
    both = everyone.split([k.shape[2], v.shape[2]], -1)
    keys, values = (torch.cat([mine[own], theirs]) for mine, theirs in zip((k, v), both, strict=True))
    if packed.stretches is None:
        out = packed_attention(q[own], keys, values, scores, packed)
    else:
        at = packed.stretches
        source = torch.arange(at.size, device=q.device) if at.source is None else at.source
        plain = replace(at, source=None, own=None, shared=None, users=None)
        mine = F.pad(q[own], (0, 0, 0, 0, 0, at.size - len(own)))
        out = _in_one_call(mine, keys[source], values[source], scores, plain)[: len(own)]
    return out.new_zeros(len(q), *out.shape[1:]).index_copy(0, own, out)[None]
