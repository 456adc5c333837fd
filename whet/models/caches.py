# SPDX-License-Identifier: Apache-2.0
"""The size of the cache that a layer needs: pages, which grow with every token, or a state of fixed size.

The native engine's cache, the memory plan and the prefix cache read these sizes here, for every type of model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LINEAR = "linear_attention"  # the type of a layer with a state, as a transformers config names it
STATE_BYTES = 4  # of a number of a state, which is in float32


@dataclass(frozen=True)
class Pages:
    """The sizes of a layer's cache of keys and values, which has an entry for every token. With `latent` (its rank, and
    the size of its rotated part) the cache stores one latent, from which keys and values of all heads are computed."""

    heads: int
    key_size: int
    value_size: int
    latent: tuple[int, int] | None = None

    @property
    def stored(self) -> tuple[int, int, int]:
        """The sizes of the cache: heads, key size, value size (0 if values are part of the keys)."""
        return (self.heads, self.key_size, self.value_size) if self.latent is None else (1, sum(self.latent), 0)

    @property
    def numbers(self) -> int:
        """The count of numbers that the layer's cache stores for a token."""
        heads, key_size, value_size = self.stored
        return heads * (key_size + value_size)


@dataclass(frozen=True)
class State:
    """The sizes of a layer's state in linear attention: the matrices [heads, key_size, value_size] that it passes from
    token to token, and the newest `tokens` inputs of its convolution over `channels`."""

    channels: int
    tokens: int
    heads: int
    key_size: int
    value_size: int

    @property
    def numbers(self) -> int:
        """The count of numbers that the layer's cache stores for a sequence."""
        return self.channels * self.tokens + self.heads * self.key_size * self.value_size


def layer_caches(config: Any) -> tuple[Pages | State, ...]:
    """Returns the cache sizes of each layer of a model with this transformers text config."""
    values = config.to_dict()
    heads, layers = key_value_heads(config), config.num_hidden_layers
    pages = Pages(heads, head_size(config), head_size(config))
    if rank := values.get("kv_lora_rank"):
        pages = Pages(
            attention_heads(config), head_size(config), values["v_head_dim"], (rank, values["qk_rope_head_dim"])
        )
    types = list(values.get("layer_types") or [])[:layers]
    if LINEAR not in types:
        return (pages,) * layers
    keys, heads = values.get("linear_num_key_heads", 0), values.get("linear_num_value_heads", 0)
    sizes = values.get("linear_key_head_dim", 0), values.get("linear_value_head_dim", 0)
    channels = 2 * keys * sizes[0] + heads * sizes[1]
    state = State(channels, values.get("linear_conv_kernel_dim", 1) - 1, heads, *sizes)
    return tuple(state if each == LINEAR else pages for each in types)


def head_size(config: Any) -> int:
    """Returns the key size D of an attention head of a model with this transformers config."""
    values = config.to_dict()
    if values.get("kv_lora_rank"):
        return int(values["qk_nope_head_dim"] + values["qk_rope_head_dim"])
    return int(values.get("head_dim") or config.hidden_size // max(1, attention_heads(config)))


def attention_heads(config: Any) -> int:
    """Returns the number of query heads of a model with this transformers config; 0 without attention."""
    return int(getattr(config, "num_attention_heads", 0))


def key_value_heads(config: Any) -> int:
    """Returns the number of key and value heads of a model with this transformers config."""
    return int(config.to_dict().get("num_key_value_heads") or attention_heads(config))


def token_bytes(config: Any, item_bytes: int) -> int:
    """Returns the bytes of a token's pages in all layers; each value takes `item_bytes`."""
    return item_bytes * sum(each.numbers for each in layer_caches(config) if isinstance(each, Pages))


def sequence_bytes(config: Any) -> int:
    """Returns the bytes of a sequence's states in all layers. They do not grow with its length."""
    return STATE_BYTES * sum(each.numbers for each in layer_caches(config) if isinstance(each, State))
