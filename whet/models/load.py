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
from whet.models import attention
from whet.models.fused import fuse
from whet.models.value_head import ValueModel

# Config fields of models whose logits are not simply hidden @ weight: whet would compute other probabilities.
CHANGED_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


def load_policy(path: str | Path) -> PreTrainedModel:
    """The causal language model at `path` in float32, with whet's attention and without dropout.  Raises: ModelError.

    Dropout would make the policy that is updated another one than that which sampled, by draws that have no key.
    """
    _supported(path)
    try:
        with without_weight_bars():
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, attn_implementation=attention.NAME
            )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{path} is not a causal language model that transformers can load: {error}") from error
    _drop_nothing(model)
    fuse(model)
    return model


def load_value_model(path: str | Path) -> ValueModel:
    """A value model whose body is the language model at `path`.  Raises: ModelError."""
    return _value_model(load_policy(path))


def outline(path: str | Path, *, is_value_model: bool = False) -> PreTrainedModel | ValueModel:
    """What `load_policy` or `load_value_model` gives, from the config alone. Called under a FakeTensorMode: shapes that
    compute shapes take no memory.  Raises: ModelError."""
    config = _supported(path)
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attention.NAME
        )
    except (ValueError, KeyError) as error:
        raise ModelError(f"{path} is not the config of a causal language model: {error}") from error
    _drop_nothing(model)
    fuse(model, shown=False)
    return _value_model(model) if is_value_model else model


def recompute_activations(model: torch.nn.Module) -> None:
    """Keeps no activations of a layer for the backward pass but its input."""
    body = model.body if isinstance(model, ValueModel) else model
    # transformers renames the method between 5.17 and 6
    name = "activation_checkpointing_enable"
    getattr(body, name if hasattr(body, name) else "gradient_checkpointing_enable")()


def _supported(path: str | Path) -> Any:
    config = load_config(path)
    changed = [name for name in CHANGED_LOGITS if config.get_text_config().to_dict().get(name) not in (None, 1.0)]
    if changed:
        raise ModelError(
            f"{path}: {config.model_type} scales its logits ({', '.join(changed)}), which whet does not do yet"
        )
    return config


def _drop_nothing(model: PreTrainedModel) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


def _value_model(model: PreTrainedModel) -> ValueModel:
    body = model.base_model
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
