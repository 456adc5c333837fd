# SPDX-License-Identifier: Apache-2.0
"""whet's attention for transformers models: one interface to train on packed rows and to decode from a block cache.

A model loaded with `attn_implementation="whet"` gets no mask from transformers. What to attend to comes by keyword
through the model's forward: `packed=Layout` (rows end to end), `paged=PagedContext` (a block KV cache), or neither
(each row from the left edge, padding on its right). All three are causal, and none drops anything out.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from whet.errors import ModelError
from whet.models.packing import Layout

NAME = "whet"
# Rows of up to so many times the head size: all weights of a layer take no more memory than so many of its queries.
SHORT = 8


class PagedContext(Protocol):
    """What a rollout engine passes as `paged=`."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int
    ) -> torch.Tensor:
        """[T, H, D], [T, KV, D], [T, KV, D] -> [T, H, D]; remembers key and value."""
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
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query [b, H, T, D], key and value [b, KV, T, D] -> [b, T, H, D], as transformers' attention interface has it."""
    if softcap is not None or s_aux is not None:
        raise ModelError("this model caps its attention scores or has attention sinks, which whet does not do yet")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if paged is not None:
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        out = paged.attend(module.layer_idx, query, key, value, scale, sliding_window or 0)  # type: ignore[arg-type]
        return out[None], None
    if packed is None:
        return _causal(query, key, value, scale, sliding_window).transpose(1, 2).contiguous(), None
    flat = [x[0].transpose(0, 1) for x in (query, key, value)]
    outs = []
    for bunch in packed.bunches:
        q, k, v = (bunch.pad(x).transpose(1, 2) for x in flat)
        outs.append(bunch.unpad(_causal(q, k, v, scale, sliding_window).transpose(1, 2)))
    return torch.cat(outs)[None], None


def _causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    length, head_dim = query.shape[2:]
    if window is not None and window >= length:
        window = None
    if query.device.type == "cpu" and length <= SHORT * head_dim:
        return _written_out(query, key, value, scale, window)
    near = None if window is None else ~_hidden(length, window, query.device)
    grouped, is_causal = query.shape[1] != key.shape[1], near is None and length > 1
    return F.scaled_dot_product_attention(query, key, value, near, is_causal=is_causal, scale=scale, enable_gqa=grouped)


def _written_out(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """softmax(query key^T) value, heads of one key together: on a CPU faster than the fused kernel for short rows."""
    (rows, heads, length, dim), kv_heads = query.shape, key.shape[1]
    group = heads // kv_heads
    hidden = _hidden(length, window, query.device)
    bias = query.new_zeros(length, length).masked_fill(hidden, float("-inf")).repeat(group, 1)
    query, key, value = (x.reshape(rows * kv_heads, -1, dim) for x in (query, key, value))
    weights = torch.baddbmm(bias, query, key.transpose(1, 2), alpha=scale).softmax(-1)
    return torch.bmm(weights, value).view(rows, heads, length, dim)


def _hidden(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """[query, key]: True where the key comes later, or is `window` tokens back or more."""
    at = torch.arange(length, device=device)
    back = at[:, None] - at
    return back < 0 if window is None else (back < 0) | (back >= window)


AttentionInterface.register(NAME, attention)
