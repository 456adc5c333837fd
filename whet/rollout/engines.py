# SPDX-License-Identifier: Apache-2.0
"""The rollout engines that ship, as a config names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from whet.registry import register_rollout
from whet.rollout.hf import HFEngine
from whet.rollout.native.cache import blocks_for
from whet.rollout.native.engine import PREFILL_TOKENS, NativeEngine
from whet.rollout.native.paged_attention import BLOCK_SIZE
from whet.rollout.planned import Decoding, RolloutBytes


@register_rollout("native", compiles=True)
class Native(NativeEngine):
    """Continuous batching over a block KV cache, with the model's own modules and whet's attention.

    kv_cache_bytes: memory for keys and values.
    compile: compiles the decode step: slower to start, faster to run.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        max_batch_size: int,
        deadline_seconds: float,
        load_tokenizer: Callable[[], PreTrainedTokenizerBase],
        device: torch.device,
        *,
        kv_cache_bytes: int = 1_073_741_824,
        compile: bool = False,  # noqa: A002  # the option's name
    ) -> None:
        super().__init__(
            dtype=dtype,
            max_batch_size=max_batch_size,
            kv_cache_bytes=kv_cache_bytes,
            compile_decode=compile,
            deadline_seconds=deadline_seconds,
            load_tokenizer=load_tokenizer,
        )

    @classmethod
    def planned_bytes(cls, decoding: Decoding, options: Mapping[str, Any]) -> RolloutBytes:
        """The whole cache, of which blocks are written to as completions grow; prompts are shared."""
        rows, n, lengths = decoding.rows, decoding.n, decoding.lengths
        per_block, prompts = decoding.token_bytes * BLOCK_SIZE, lengths.spread(-(-rows // n))
        cache, blocks = options["kv_cache_bytes"] // per_block * per_block, 0
        for prompt in prompts:
            own = blocks_for(prompt + lengths.response) - prompt // BLOCK_SIZE
            blocks += blocks_for(prompt) + min(n, rows) * own
        written = min(cache, blocks * per_block)
        tokens = min(sum(prompts), max(PREFILL_TOKENS, *lengths.prompts))
        return RolloutBytes(cache, written, True, len(prompts), tokens, {"kv_cache_bytes": max(2**26, written // 2)})


@register_rollout("hf")
class HF(HFEngine):
    """transformers' own forward and cache, every row until all are done: slow, and works for every language model."""

    def __init__(
        self,
        dtype: torch.dtype,
        max_batch_size: int,
        deadline_seconds: float,
        load_tokenizer: Callable[[], PreTrainedTokenizerBase],
        device: torch.device,
    ) -> None:
        super().__init__(
            dtype=dtype, max_batch_size=max_batch_size, deadline_seconds=deadline_seconds, load_tokenizer=load_tokenizer
        )

    @classmethod
    def planned_bytes(cls, decoding: Decoding, options: Mapping[str, Any]) -> RolloutBytes:
        """One tensor a layer, which grows by being copied."""
        rows, lengths = decoding.rows, decoding.lengths
        used = rows * (max(lengths.prompts) + lengths.response) * decoding.token_bytes
        used += used // decoding.layers
        return RolloutBytes(used, used, False, rows, sum(lengths.spread(rows)))
