# SPDX-License-Identifier: Apache-2.0
"""Models and tokenizers from Hugging Face folders."""

from __future__ import annotations

import logging
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
from whet.models.folder import check_weights, split_adapters
from whet.models.fused import fuse
from whet.models.lora import merge_adapter
from whet.models.value_head import TrainedModel, ValueModel

log = logging.getLogger(__name__)


def load_policy(path: str | Path, *, adapter_path: str | None = None, allow_pickle: bool = False) -> PreTrainedModel:
    """The causal language model at `path` in float32, with whet's attention and without dropout.  Raises: ModelError.

    Adapters, where `path` is an adapter's folder and the one at `adapter_path`, are merged into the weights.
    Dropout would make the policy that is updated another one than that which sampled, by draws that have no key.
    """
    base, adapters = split_adapters(path)
    load_config(base)
    check_weights(base, allow_pickle=allow_pickle)
    model = _load_whole(base, allow_pickle)
    for adapter in [*adapters, *([adapter_path] if adapter_path is not None else [])]:
        model = merge_adapter(model, adapter, allow_pickle=allow_pickle)
    _drop_nothing(model)
    fuse(model)
    return model


def _load_whole(path: str, allow_pickle: bool) -> PreTrainedModel:
    try:
        with without_weight_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=torch.float32,
                attn_implementation=attention.NAME,
                experts_implementation=experts.NAME,
                use_safetensors=None if allow_pickle else True,
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"{path} is not a causal language model that transformers can load: {error}") from error
    model, report = loaded  # as output_loading_info asks
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"{path} lacks {len(missing)} weights of {type(model).__name__}, such as {missing[0]}: they would be "
            "random; fetch the folder again, or name one whose weights fit its config.json"
        )
    assert isinstance(model, PreTrainedModel)
    return model


def load_value_model(path: str | Path, *, adapter_path: str | None = None, allow_pickle: bool = False) -> ValueModel:
    """A value model whose body is the language model at `path`.  Raises: ModelError."""
    return _value_model(load_policy(path, adapter_path=adapter_path, allow_pickle=allow_pickle))


def outline(path: str | Path, *, is_value_model: bool = False) -> TrainedModel:
    """What `load_policy` or `load_value_model` gives, from the config alone. To be called under
    `torch.device("meta")`, where it takes no memory.  Raises: ModelError."""
    config = load_config(path)
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attention.NAME, experts_implementation=experts.NAME
        )
    except (ValueError, KeyError) as error:
        raise ModelError(f"{path} is not the config of a causal language model: {error}") from error
    _drop_nothing(model)
    fuse(model)
    return _value_model(model) if is_value_model else model


def body_of(model: torch.nn.Module) -> PreTrainedModel:
    """The transformers model in what `load_policy` or `load_value_model` gives."""
    body = model.body if isinstance(model, ValueModel) else model
    assert isinstance(body, PreTrainedModel)
    return body


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a config's dtype name."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def recompute_activations(model: torch.nn.Module) -> None:
    """Keeps no activations of a layer for the backward pass but its input."""
    body = body_of(model)
    # transformers renames the method between 5.17 and 6
    name = "activation_checkpointing_enable"
    getattr(body, name if hasattr(body, name) else "gradient_checkpointing_enable")()


def layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules in the model's outermost lists, in order."""
    found: list[torch.nn.Module] = []
    for child in model.children():
        found.extend(child if isinstance(child, torch.nn.ModuleList) else layers(child))
    return found


def compile_layers(model: torch.nn.Module) -> None:
    """torch compiles each layer when it first runs, for rows of any length."""
    for layer in layers(body_of(model)):
        layer.compile(dynamic=True)


def _drop_nothing(model: PreTrainedModel) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


def _value_model(model: PreTrainedModel) -> ValueModel:
    body = model.base_model
    assert isinstance(body, PreTrainedModel)
    return ValueModel(body)


def load_tokenizer(path: str | Path, *models: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer at `path`, or of an adapter's base; one without a padding token pads with its end token.

    Raises: ModelError, also where one of `models` has fewer embedding rows than it has tokens.
    """
    base, adapters = split_adapters(path)
    own = [adapter for adapter in adapters if (Path(adapter) / "tokenizer_config.json").is_file()]
    try:
        tokenizer: PreTrainedTokenizerBase = (
            AutoTokenizer.from_pretrained(own[-1], config=load_config(base))
            if own
            else AutoTokenizer.from_pretrained(base)
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"no tokenizer could be loaded from {path}: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ModelError(f"the tokenizer at {path} has no end token: no answer would end; set eos_token in its config")
    if tokenizer.pad_token_id is None:
        log.info("the tokenizer at %s has no padding token; its end token %r pads", path, tokenizer.eos_token)
        tokenizer.pad_token = tokenizer.eos_token
    needed = max(tokenizer.get_vocab().values()) + 1
    for model in models:
        if (rows := load_config(model).get_text_config().vocab_size) < needed:
            raise ModelError(
                f"the tokenizer at {path} has token ids up to {needed - 1}, and the model at {model} only {rows} "
                "embedding rows; name the tokenizer that belongs to the model (model.tokenizer_path)"
            )
    return tokenizer


def load_config(path: str | Path) -> Any:
    """The transformers config at `path`, or of an adapter's base, without weights.  Raises: ModelError."""
    path, _ = split_adapters(path)
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        hint = "" if Path(path).exists() else " (there is no such folder, and no model of that name could be fetched)"
        raise ModelError(f"{path} has no readable model config{hint}: {error}") from error


def load_generation_config(path: str | Path) -> GenerationConfig | None:
    """The generation config at `path`, or of an adapter's base, None where a model has none of its own."""
    try:
        config: GenerationConfig = GenerationConfig.from_pretrained(split_adapters(path)[0])
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
