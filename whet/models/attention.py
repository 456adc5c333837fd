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
    if packed is not None:
        query, key, value = (packed.pad(x[0].transpose(0, 1)).transpose(1, 2) for x in (query, key, value))
    out = _causal(query, key, value, scale, sliding_window).transpose(1, 2)
    return (packed.unpad(out)[None] if packed is not None else out.contiguous()), None


def _causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    grouped = query.shape[1] != key.shape[1]
    length = query.shape[2]
    if window is None or window >= length:
        return F.scaled_dot_product_attention(query, key, value, is_causal=length > 1, scale=scale, enable_gqa=grouped)
    distance = torch.arange(length, device=query.device)[:, None] - torch.arange(length, device=query.device)
    near = (distance >= 0) & (distance < window)
    return F.scaled_dot_product_attention(query, key, value, near, scale=scale, enable_gqa=grouped)


AttentionInterface.register(NAME, attention)
