# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant models: a token's results do not depend on the other tokens of the batch. Matrix products, norms,
attention and output layer use the kernels of `kernels.batch_invariant`, in sampling and in training."""

from __future__ import annotations

import os

import torch
from transformers import PreTrainedModel

from whet.devices import runs_triton
from whet.errors import EngineError
from whet.kernels.batch_invariant import DTYPE, FIXED
from whet.kernels.log_probs import LogitForm
from whet.kernels.tiles import tile_tokens
from whet.models.attention import LONGEST_HEAD
from whet.models.caches import head_size, key_value_heads
from whet.models.encoders.load import encoders_of
from whet.models.lora import adapted_layers

KEY = "rollout.engine.options.batch_invariant"


def fix_tiles(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> int:
    """Replaces a model's modules by their batch-invariant counterparts in `FIXED`; weights and names stay.  Returns the
    number of tokens of an attention tile.  Raises: EngineError naming the property that prevents it."""
    if problem := _problem(model, device, dtype):
        raise EngineError(f"{KEY}=true", problem, "", "unset it")
    for module in model.modules():
        module.__class__ = FIXED.get(type(module), type(module))
    config = model.config.get_text_config()
    return tile_tokens(config.num_attention_heads, key_value_heads(config))


def _problem(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> str:
    """Names the property that prevents a batch-invariant model; "" if nothing prevents it."""
    config, kind = model.config.get_text_config(), type(model).__name__
    if os.environ.get("TRITON_INTERPRET") != "1" and not runs_triton(device, f"{KEY} cannot be"):
        return f"needs an accelerator for which Triton compiles, and the model is on {device}"
    if dtype != DTYPE:
        return f"computes in bfloat16, and model.dtype is {str(dtype).removeprefix('torch.')}"
    if adapted_layers(model):
        return "trains whole models: a rollout adds an adapter to the weights, and rounds other numbers"
    if encoders_of(model) is not None:
        return f"is for models of text, and {kind} sees"
    if LogitForm.of(config) != LogitForm() or config.to_dict().get("attn_logit_softcapping"):
        return f"knows no scale or cap of logits and scores, and {kind} has one"
    if (size := head_size(config)) > LONGEST_HEAD or size % 8:
        return f"is for heads of at most {LONGEST_HEAD} numbers, a multiple of 8, and those of {kind} have {size}"
    for name, module in model.named_modules():
        if module._parameters and type(module) not in {*FIXED, *FIXED.values()}:
            return f"has no kernel with fixed tiles for {type(module).__name__} ({name} of {kind})"
    return ""
