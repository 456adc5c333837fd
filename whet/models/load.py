# SPDX-License-Identifier: Apache-2.0
"""Models and tokenizers from Hugging Face folders."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import set_tqdm_hook

from whet.errors import ModelError
from whet.models import attention, experts
from whet.models.fused import fuse
from whet.models.value_head import ValueModel


def load_policy(path: str | Path) -> PreTrainedModel:
    """The causal language model at `path` in float32, with whet's attention and without dropout.  Raises: ModelError.

    Dropout would make the policy that is updated another one than that which sampled, by draws that have no key.
    """
    load_config(path)
    try:
        with without_weight_bars():
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=torch.float32,
                attn_implementation=attention.NAME,
                experts_implementation=experts.NAME,
            )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{path} is not a causal language model that transformers can load: {error}") from error
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    fuse(model)
    return model


def load_value_model(path: str | Path) -> ValueModel:
    """A value model whose body is the language model at `path`.  Raises: ModelError."""
    body = load_policy(path).base_model
    assert isinstance(body, PreTrainedModel)
    return ValueModel(body)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer at `path`; one without a padding token pads with its end token.  Raises: ModelError."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"no tokenizer could be loaded from {path}: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ModelError(f"the tokenizer at {path} has no end token: no answer would end; set eos_token in its config")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_config(path: str | Path) -> Any:
    """The transformers config at `path`, without weights.  Raises: ModelError."""
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        hint = "" if Path(path).exists() else " (there is no such folder, and no model of that name could be fetched)"
        raise ModelError(f"{path} has no readable model config{hint}: {error}") from error


def load_generation_config(path: str | Path) -> GenerationConfig | None:
    """The generation config at `path`, None where a model has none of its own."""
    try:
        config: GenerationConfig = GenerationConfig.from_pretrained(path)
    except OSError:
        return None
    return config


def stop_token_ids(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Tokens that end an answer: the tokenizer's, and those of the model's generation config where it has one."""
    found = {tokenizer.eos_token_id}
    generation = load_generation_config(path)
    if generation is not None:
        eos = generation.eos_token_id
        found.update(eos if isinstance(eos, list) else [eos])
    return tuple(sorted(token for token in found if token is not None))


@contextmanager
def without_weight_bars() -> Iterator[None]:
    """transformers draws no bars over tensors and files for as long as the block lasts; downloads keep theirs."""
    before = set_tqdm_hook(lambda bar, args, kwargs: bar(*args, **{**kwargs, "disable": True}))
    try:
        yield
    finally:
        set_tqdm_hook(before)
