# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention over a cache of latents (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1).

A module computes keys and values of all heads from one latent c of a token: k_h = [A_h c | r], v_h = B_h c, with a
rotated part r that all heads share. So q_h k_h = (A_h^T q_h) c + q_h r, and the weighted sum of values is B_h times the
weighted sum of latents. This is attention with one key head: keys [c | r] and values c serve any number of heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from whet.kernels.linear import FastLinear


class LatentProjection(FastLinear):
    """The projection from latents to keys and values. Without gradient it keeps its input for `take_latents`."""

    latents: torch.Tensor | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # its name in torch
        """Projects latents: [..., rank] -> [..., heads (D - rotary + V)]."""
        if not torch.is_grad_enabled():
            self.latents = input
        return super().forward(input)


def keep_latents(model: nn.Module) -> None:
    """Replaces the model's projections of latents by `LatentProjection`; weights and names stay."""
    for module in model.modules():
        if type(linear := getattr(module, "kv_b_proj", None)) is FastLinear:
            linear.__class__ = LatentProjection


def take_latents(module: Any) -> torch.Tensor | None:
    """Returns the latents [T, rank] from which the attention module has just computed keys and values, and frees them.
    None for modules without latents, and in a pass with gradient."""
    linear = getattr(module, "kv_b_proj", None)
    linear = getattr(linear, "base_layer", linear)  # the projection inside an adapter
    if not isinstance(linear, LatentProjection) or linear.latents is None:
        return None
    found, linear.latents = linear.latents, None
    return found.flatten(0, -2)


def absorbed(
    module: Any, latents: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Converts query and key [T, H, D] and value [T, H, V] to attention with one key head: query [T, H, rank + rotary],
    key [T, 1, rank + rotary], value [T, 1, rank]. Also returns the weight [H, V, rank] that maps its result to V."""
    rank, plain = latents.shape[1], key.shape[2] - module.qk_rope_head_dim
    weight = _weight(module.kv_b_proj, latents).view(query.shape[1], -1, rank)
    to_key, to_value = weight.split([plain, value.shape[2]], 1)
    inner = torch.einsum("thn,hnr->thr", query[..., :plain], to_key)
    key = torch.cat([latents, key[:, 0, plain:]], -1)[:, None]
    return torch.cat([inner, query[..., plain:]], -1), key, latents[:, None], to_value


def _weight(linear: Any, latents: torch.Tensor) -> torch.Tensor:
    """Returns the projection's weight [heads (D - rotary + V), rank], with an adapter merged."""
    if isinstance(linear, LatentProjection):
        return linear.weight
    whole: torch.Tensor = linear(torch.eye(latents.shape[1], dtype=latents.dtype, device=latents.device)).mT
    linear.base_layer.latents = None
    return whole
