# SPDX-License-Identifier: Apache-2.0
"""whet's attention for transformers models: one interface to train on packed rows and to decode from a block cache.

A model loaded with `attn_implementation="whet"` gets no mask from transformers. A keyword of the model's forward
selects the form: `packed=Layout` (concatenated rows), `paged=PagedContext` (a block KV cache), or neither (each row
from the left edge, padding on its right). All three are causal, but for runs of a packed layout, and without dropout.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from whet.models.caches import head_size
from whet.models.latent import absorbed, take_latents
from whet.models.linear_attention import Flow
from whet.models.packing import Bunch, Layout, SpreadTokens, Stretches
from whet.models.sequence_parallel import TokenShare
from whet.models.varlen import has_kernel, varlen_attention

NAME = "whet"
# Rows of at most SHORT * head_dim tokens are short: their attention weights take at most SHORT times the memory of the
# queries.
SHORT = 8
LONGEST_HEAD = 256  # numbers of a head that FlashAttention takes
HOPPER = 9  # of NVIDIA's compute capabilities, the number before the point


def implementation(config: Any) -> str | dict[str, str]:
    """The argument `attn_implementation` for a model with this transformers config: whet's attention for the text, and
    torch's for a vision tower, whose tokens attend in both directions."""
    if config.get_text_config() is config:
        return NAME
    return {"text_config": NAME, **{name: "sdpa" for name in config.sub_configs if name != "text_config"}}


def takes_one_call(config: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """True where one call of FlashAttention computes a layer's attention over packed rows of a model with this text
    config."""
    return fits_one_call(config, dtype) and has_kernel(device)


def fits_one_call(config: Any, dtype: torch.dtype) -> bool:
    """True where FlashAttention takes a model: bfloat16, heads of at most 256 numbers, no cap on scores."""
    size, cap = head_size(config), config.to_dict().get("attn_logit_softcapping")
    return dtype == torch.bfloat16 and not cap and size <= LONGEST_HEAD and size % 8 == 0


class Scores(NamedTuple):
    """The form of attention: softmax(s) value, s = scale query key^T, or with a cap cap tanh(s / cap)."""

    scale: float
    window: int = 0  # newest keys that a query attends to, its own included; 0: all
    cap: float = 0.0  # 0: none
    sinks: torch.Tensor | None = None  # [H] one more score of each query, without a value (Xiao et al. 2023)


class PagedContext(Protocol):
    """The argument `paged=` that a rollout engine passes."""

    flow: Flow | None  # of models with linear attention

    @property
    def compiles(self) -> bool:
        """True where `layer` gives what a compiled layer can read."""
        ...

    def layer(self, number: int) -> PagedContext:
        """The part for one layer."""
        ...

    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        """[T, H, D], [T, KV, D], [T, KV, V] -> [T, H, V]; stores key and value in the cache."""
        ...


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
    """query [b, H, T, D], key [b, KV, T, D], value [b, KV, T, V] -> [b, T, H, V], transformers' attention interface."""
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
        return _causal(query, key, value, scores, None).transpose(1, 2).contiguous(), None
    device = query.device.type
    if torch.is_autocast_enabled(device):  # once, instead of in every grid
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    if token_share is not None:
        query, key, value = (token_share.to_heads(x) for x in (query, key, value))
        scores = scores if s_aux is None else scores._replace(sinks=token_share.own_heads(s_aux))
        if packed.ring_order is not None:
            return token_share.to_tokens(_in_ring(query, key, value, scores, packed, token_share)), None
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    if packed.stretches is None:
        real = len(packed.input_ids)
        out = _bunches(query[:real], key[:real], value[:real], scores, packed)
    else:
        real = packed.stretches.size
        out = _in_one_call(query[:real], key[:real], value[:real], scores, packed.stretches)
    if real < len(query):
        out = torch.cat([out, out.new_zeros(len(query) - real, *out.shape[1:])])
    return out[None] if token_share is None else token_share.to_tokens(out[None]), None


def _in_one_call(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores, where: Stretches
) -> torch.Tensor:
    """[T, H, D], [K, KV, D], [K, KV, V] -> [T, H, V]."""
    size, wide = value.shape[2], _widened(value, key.shape[2])
    return varlen_attention(query, key, wide, where, scores.scale, scores.window, scores.sinks)[..., :size]


@torch.compiler.disable  # its shapes differ in every batch; the code around it need not be compiled again
def _bunches(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: Scores, packed: Layout
) -> torch.Tensor:
    """[n, H, D], [K, KV, D], [K, KV, V] -> [n, H, V], of the n tokens of the bunches."""
    parts = ((queries, False), (keys, True), (values, True))
    spread = [SpreadTokens.apply(flat, packed.bunches, with_prompts) for flat, with_prompts in parts]
    grids = zip(packed.bunches, *spread, strict=True)
    outs = []
    for bunch, *heads in grids:
        q, k, v = (x.transpose(1, 2) for x in heads)
        outs.append(bunch.unpad(_causal(q, k, v, scores, bunch).transpose(1, 2)))
    return torch.cat(outs) if outs else values.new_zeros(0, queries.shape[1], values.shape[2]) + queries.sum() * 0.0


@torch.compiler.disable
def _in_ring(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores, packed: Layout, share: TokenShare
) -> torch.Tensor:
    """[1, H, n, D], [1, KV, n, D], [1, KV, n, V] -> [1, n, H, V]: the keys and values of all rings are gathered."""
    assert packed.ring_order is not None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    everyone, own = share.gather_rings(torch.cat([k, v], -1)), packed.ring_order
    if not len(own):  # padding alone
        return (q[..., :1].expand(-1, -1, v.shape[2]) * 0.0 + everyone.sum() * 0.0)[None]
    both = everyone.split([k.shape[2], v.shape[2]], -1)
    keys, values = (torch.cat([mine[own], theirs]) for mine, theirs in zip((k, v), both, strict=True))
    if packed.stretches is None:
        out = _bunches(q[own], keys, values, scores, packed)
    else:
        at = packed.stretches
        source = torch.arange(at.size, device=q.device) if at.source is None else at.source
        plain = replace(at, source=None, own=None, shared=None, users=None)
        mine = F.pad(q[own], (0, 0, 0, 0, 0, at.size - len(own)))
        out = _in_one_call(mine, keys[source], values[source], scores, plain)[: len(own)]
    return out.new_zeros(len(q), *out.shape[1:]).index_copy(0, own, out)[None]


def _causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores, bunch: Bunch | None
) -> torch.Tensor:
    """[b, H, Q, D], [b, KV, K, D], [b, KV, K, V] -> [b, H, Q, V]; the queries are the last Q of the keys' tokens."""
    length, head_dim = query.shape[2:]
    scale, window, cap, sinks = scores
    window = window if window < key.shape[2] else 0
    # torch's fused kernel has no cap on scores, and no sinks
    if cap or sinks is not None or (query.device.type == "cpu" and length <= SHORT * head_dim):
        return _unfused(query, key, value, scores, _hidden(query, key, window, bunch))
    is_whole = not window and length == key.shape[2] and (bunch is None or bunch.key_runs is None)
    return _fused(query, key, value, scale, None if is_whole else ~_hidden(query, key, window, bunch)[:, None])


def _fused(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, seen: torch.Tensor | None
) -> torch.Tensor:
    """The kernel of torch, causal where no mask says which keys are `seen`."""
    grouped = query.shape[1] != key.shape[1]
    if grouped and _writes_scores(query, is_masked=seen is not None):
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        grouped = False
    is_causal, size = seen is None, value.shape[-1]
    value, attend = _widened(value, key.shape[-1]), F.scaled_dot_product_attention
    return attend(query, key, value, seen, is_causal=is_causal, scale=scale, enable_gqa=grouped)[..., :size]


def _widened(value: torch.Tensor, size: int) -> torch.Tensor:
    """Values with heads of the size of the keys', as torch's kernels need them, with zeros."""
    return value if value.shape[-1] == size else F.pad(value, (0, size - value.shape[-1]))


def _writes_scores(query: torch.Tensor, *, is_masked: bool) -> bool:
    """True where torch would take the kernel that writes all scores for heads in groups: on an accelerator its others
    know none in float32, nor with a mask before Hopper, from which on it prefers cuDNN's (its sdp_utils.cpp, 2.11)."""
    if query.device.type == "cpu":  # its fused kernel knows groups; a plan for an accelerator has SHORT at 0
        return not SHORT and (query.dtype == torch.float32 or is_masked)
    return query.dtype == torch.float32 or (is_masked and _generation(query.device) < HOPPER)


@cache
def _generation(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def _unfused(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, form: Scores, hidden: torch.Tensor
) -> torch.Tensor:
    """softmax(query key^T) value, one product for the heads of a key: for short rows on a CPU faster than fused."""
    (rows, heads, length, dim), kv_heads, sinks = query.shape, key.shape[1], form.sinks
    group = heads // kv_heads
    bias = query.new_zeros(hidden.shape).masked_fill(hidden, float("-inf"))[:, None, None]
    # The matrix product itself broadcasts a mask that all rows share.
    alike = (1, 1) if len(hidden) == 1 else (rows, kv_heads)
    bias = bias.expand(*alike, group, -1, -1).reshape(alike[0] * alike[1], group * length, -1)
    query, key = (x.reshape(rows * kv_heads, -1, dim) for x in (query, key))
    value = value.reshape(rows * kv_heads, -1, value.shape[-1])
    if not form.cap:
        scores = torch.baddbmm(bias, query, key.transpose(1, 2), alpha=form.scale)
    else:
        scores = torch.bmm(query, key.transpose(1, 2)).mul(form.scale / form.cap).tanh().mul(form.cap) + bias
    if sinks is not None:
        sinks = sinks.view(kv_heads, group, 1, 1).expand(rows, -1, -1, length, 1).reshape(rows * kv_heads, -1, 1)
    return torch.bmm(softmax(scores, sinks), value).view(rows, heads, length, -1)


def softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """exp(s) / (sum of exp(s) + exp(sink)) over the last dimension; `sinks` are broadcast to [..., 1]."""
    if sinks is None:
        return scores.softmax(-1)
    both = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], -1)
    return both.softmax(-1)[..., :-1]


def _hidden(query: torch.Tensor, key: torch.Tensor, window: int, bunch: Bunch | None) -> torch.Tensor:
    """[b or 1, Q, K]: True where the key is padding, or after the query, or before its `window`."""
    if bunch is not None and not window:
        return bunch.hidden
    length, seen = query.shape[2], key.shape[2]
    at = torch.arange(seen, device=query.device)
    back = at[seen - length :, None] - at
    hidden = (back < 0)[None] if bunch is None else bunch.hidden
    return hidden | (back >= window) if window else hidden


AttentionInterface.register(NAME, attention)
