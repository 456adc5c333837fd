# SPDX-License-Identifier: Apache-2.0
"""Causal attention over rows of equal length: by torch's fused kernel, or by two matrix products, which compute short
rows on a CPU, caps on scores, and sinks."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

# Rows of at most SHORT * head_dim tokens are short: attention weights take at most SHORT times the memory of queries.
SHORT = 8
HOPPER = 9  # the number before the point of its compute capability


class Scores(NamedTuple):
    """The form of attention: softmax(s) value with s = scale query key^T; with a cap, s becomes cap tanh(s / cap)."""

    scale: float
    window: int = 0  # number of newest keys that a query attends to, its own key included; 0: all keys
    cap: float = 0.0  # 0: no cap
    sinks: torch.Tensor | None = None  # [H] one more score of each query, without a value (Xiao et al. 2023)


class Mask(Protocol):
    """The mask of padded rows: tells to which keys each query may attend."""

    @property
    def hidden(self) -> torch.Tensor:
        """The mask [rows or 1, Q, K], True for a key to which a query must not attend."""
        ...

    @property
    def key_runs(self) -> torch.Tensor | None:
        """The number of each key's run, 0 outside. Keys of a run attend in both directions. None without runs."""
        ...


def causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores, mask: Mask | None
) -> torch.Tensor:
    """Attends causally; queries are the last Q tokens: [b, H, Q, D], [b, KV, K, D], [b, KV, K, V] -> [b, H, Q, V]."""
    length, head_dim = query.shape[2:]
    scale, window, cap, sinks = scores
    window = window if window < key.shape[2] else 0
    # torch's fused kernel has no cap on scores, and no sinks
    if cap or sinks is not None or (query.device.type == "cpu" and length <= SHORT * head_dim):
        return _unfused(query, key, value, scores, _hidden(query, key, window, mask))
    is_whole = not window and length == key.shape[2] and (mask is None or mask.key_runs is None)
    return _fused(query, key, value, scale, None if is_whole else ~_hidden(query, key, window, mask)[:, None])


def _fused(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, seen: torch.Tensor | None
) -> torch.Tensor:
    """Calls torch's fused kernel. The mask `seen` is True for keys to which a query attends; None: causal attention."""
    grouped = query.shape[1] != key.shape[1]
    if grouped and _writes_scores(query, is_masked=seen is not None):
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        grouped = False
    is_causal, size = seen is None, value.shape[-1]
    value, attend = widened(value, key.shape[-1]), F.scaled_dot_product_attention
    return attend(query, key, value, seen, is_causal=is_causal, scale=scale, enable_gqa=grouped)[..., :size]


def widened(value: torch.Tensor, size: int) -> torch.Tensor:
    """Pads the values with zeros to the head size of the keys, because torch's kernels need equal sizes."""
    return value if value.shape[-1] == size else F.pad(value, (0, size - value.shape[-1]))


def _writes_scores(query: torch.Tensor, *, is_masked: bool) -> bool:
    """Tells whether torch, for grouped heads, would choose its kernel that stores all scores. On an accelerator, no
    other kernel supports grouped heads in float32, or with a mask on GPUs before Hopper. From Hopper on, torch prefers
    cuDNN's kernel (sdp_utils.cpp, 2.11)."""
    if query.device.type == "cpu":  # its fused kernel supports groups; the planner sets SHORT to 0 for an accelerator
        return not SHORT and (query.dtype == torch.float32 or is_masked)
    return query.dtype == torch.float32 or (is_masked and _generation(query.device) < HOPPER)


@cache
def _generation(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def _unfused(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, form: Scores, hidden: torch.Tensor
) -> torch.Tensor:
    """Computes softmax(query key^T) value, with one matrix product for all query heads of a key head. Faster than the
    fused kernel for short rows on a CPU."""
    (rows, heads, length, dim), kv_heads, sinks = query.shape, key.shape[1], form.sinks
    group = heads // kv_heads
    bias = query.new_zeros(hidden.shape).masked_fill(hidden, float("-inf"))[:, None, None]
    # The matrix product broadcasts a mask that all rows share.
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
    """Computes exp(s) / (sum of exp(s) + exp(sink)) over the last dimension. `sinks` are broadcast to [..., 1]."""
    if sinks is None:
        return scores.softmax(-1)
    both = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], -1)
    return both.softmax(-1)[..., :-1]


def _hidden(query: torch.Tensor, key: torch.Tensor, window: int, mask: Mask | None) -> torch.Tensor:
    """Builds a mask [b or 1, Q, K]: True if a key is padding, after the query, or before the query's `window`."""
    if mask is not None and not window:
        return mask.hidden
    length, seen = query.shape[2], key.shape[2]
    at = torch.arange(seen, device=query.device)
    back = at[seen - length :, None] - at
    hidden = (back < 0)[None] if mask is None else mask.hidden
    return hidden | (back >= window) if window else hidden
