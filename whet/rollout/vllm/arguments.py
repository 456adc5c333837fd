# SPDX-License-Identifier: Apache-2.0
"""The engine arguments of vLLM that whet sets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from whet.config.schema import ModelConfig
from whet.devices import HOST
from whet.errors import ConfigError
from whet.models.folder import split_adapters

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes room for


def engine_arguments(
    model: ModelConfig,
    dtype: torch.dtype,
    max_batch_size: int,
    device: torch.device,
    kv_cache_bytes: int,
    *,
    compile: bool,  # noqa: A002
    adapter: bool,
) -> dict[str, Any]:
    """The engine arguments of vLLM that whet sets.  Raises: ConfigError."""
    base, _ = split_adapters(str(model.path))  # adapters come by `load`
    return {
        **_where_found(base, model),
        "dtype": str(dtype).removeprefix("torch."),
        "max_num_seqs": max_batch_size,
        "kv_cache_memory_bytes": kv_cache_bytes,
        "enforce_eager": not compile,
        "enable_sleep_mode": device != HOST,
        "trust_remote_code": model.trust_remote_code,
        "worker_extension_cls": "whet_vllm.Extension",
        "weight_transfer_config": {"backend": "whet"},
        "generation_config": "vllm",  # no defaults of the folder's generation_config.json
        "logprobs_mode": "raw_logprobs",
        **(_for_adapter(model) if adapter else {}),
    }


def _where_found(base: str, model: ModelConfig) -> dict[str, Any]:
    """The model's folder as an absolute path (the server runs elsewhere), or its hub name; the tokenizer's too."""
    paths = {"model": base, "tokenizer": model.tokenizer_path or base}
    return {name: str(Path(path).resolve()) if Path(path).exists() else path for name, path in paths.items()}


def _for_adapter(model: ModelConfig) -> dict[str, Any]:
    """The arguments for the adapter that a run trains.  Raises: ConfigError for one that vLLM cannot sample with."""
    rank = model.lora.rank
    if rank is None or rank > RANKS[-1] or model.lora.path is not None or split_adapters(str(model.path))[1]:
        raise ConfigError(
            f"rollout.engine.options.adapter=true with model.lora.rank={rank}; expected a rank of 1 to {RANKS[-1]} "
            "over the weights of a whole model's folder, without another adapter: set it to false"
        )
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": min(each for each in RANKS if each >= rank)}


def max_length(server: Mapping[str, Any], positions: int) -> int:
    """The longest sequence that vLLM is to take.  Raises: ConfigError for one that the model cannot have."""
    length = server.get("max_model_len", positions)
    if not isinstance(length, int) or not 0 < length <= positions:
        raise ConfigError(
            f"rollout.engine.options.server.max_model_len={length!r}; expected 1 to {positions}, the positions of the "
            "model: lower it, or leave it out"
        )
    return length
