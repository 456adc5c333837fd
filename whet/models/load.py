# SPDX-License-Identifier: Apache-2.0
"""Loads models and tokenizers from Hugging Face folders."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_layers import GenericForSequenceClassification as RewardModel
from transformers.utils.logging import set_tqdm_hook

from whet.data.written import end_of_turn
from whet.errors import ModelError, WeightSyncError
from whet.kernels.fused import fuse
from whet.keyed import key
from whet.models import attention, experts, general
from whet.models.encoders.base import Encoders, body_of as language_body
from whet.models.encoders.load import attach, load_encoders, names_of
from whet.models.folder import check_weights, reading, require_model, split_adapters
from whet.models.latent import keep_latents
from whet.models.linear_attention import follow_rows
from whet.models.lora import HEAD, merge_adapter
from whet.models.supported import Support, lack_of, set_support
from whet.options import as_list

log = logging.getLogger(__name__)
NO_CLASSIFIER = "is not a sequence classifier over a causal language model that transformers can load"
# Upper limits of a valid config.json: with larger values even an outline on meta would take hours, or overflow.
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
NO_LIMIT = 2**30
ROUTER_BIASES = (".e_score_correction_bias", ".expert_bias")  # ends of their names
NOISE = {"jitter_noise", "input_jitter_noise"}  # of hidden states before a router
LARGEST = {"num_hidden_layers": 2**10, **dict.fromkeys((*SIZES, "max_position_embeddings"), 2**30)}


def load_policy(
    path: str | Path, *, adapter_path: str | None = None, allow_pickle: bool = False, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Loads the causal language model at `path` in float32 and without dropout. It uses whet's attention or, for other
    kinds of layers, transformers' own (`support_of`). A model that reads images gets its encoders (`encoders_of`), and
    its vision tower torch's attention.

    Adapters are merged into the weights: the adapters of `path`, if it is an adapter's folder, and the adapter at
    `adapter_path`. Dropout is off because its random numbers would make the updated policy differ from the sampling
    policy.  Raises: ModelError."""
    base, adapters = split_adapters(path)
    config = load_config(base, trust_remote_code=trust_remote_code)
    encoders = load_encoders(base, config, trust_remote_code=trust_remote_code)
    check_weights(base, allow_pickle=allow_pickle)
    with reading(base, "is not a causal language model that transformers can load"):
        model, missing = _load_whole(_class_of(encoders), base, config, allow_pickle, trust_remote_code)
    check_complete(model, base, missing)
    for adapter in [*adapters, *([adapter_path] if adapter_path is not None else [])]:
        model = merge_adapter(model, adapter, allow_pickle=allow_pickle)
    check_finite(model, path)
    _prepare(model, path)
    attach(model, encoders)
    return model


def _class_of(encoders: Encoders | None) -> Any:
    return AutoModelForCausalLM if encoders is None else encoders.own[0].auto_class


@torch.no_grad()
def check_finite(model: torch.nn.Module, path: str | Path) -> None:
    """Checks this rank's weights for NaN and infinity.  Raises: ModelError."""
    for name, weight in model.named_parameters():
        here = weight.to_local() if isinstance(weight, DTensor) else weight
        # The sum is several times faster than a check of each number; it is finite if all are, unless it overflows.
        if not here.sum().isfinite() and not here.isfinite().all():
            found = f"has numbers that are not finite (NaN or infinity) in {name}"
            why = "finite weights: with others every response is noise and every update fails"
            raise ModelError(f"{path}", found, why, "fetch the folder again, or start from another model")


def _load_whole(
    kind: Any, path: str, config: Any, allow_pickle: bool, trust_remote_code: bool
) -> tuple[PreTrainedModel, set[str]]:
    """Loads the model at `path` by the auto class `kind`.  Returns it, and the names of weights that its files lack."""
    options = {
        "use_safetensors": None if allow_pickle else True,
        "trust_remote_code": trust_remote_code,
        "output_loading_info": True,
        **_options(),
    }
    with without_weight_bars():
        loaded = _with_attention(partial(kind.from_pretrained, path, **options), config)
    model, report = loaded  # a pair because of output_loading_info
    assert isinstance(model, PreTrainedModel)
    return model, set(report["missing_keys"])


def _options() -> dict[str, Any]:
    return {"dtype": torch.float32, "experts_implementation": experts.implementation()}


def _with_attention(make: Callable[..., Any], config: Any) -> Any:
    """Calls `make` with whet's attention, or with the model's own attention if transformers cannot replace it."""
    try:
        return make(config=copy.deepcopy(config), attn_implementation=attention.implementation(config))
    except KeyError as error:
        if error.args != (attention.NAME,):  # a model's own table of attention classes lacks this name
            raise
        return make(config=config, attn_implementation="eager")


def check_complete(model: PreTrainedModel, path: str | Path, missing: Collection[str]) -> None:
    """Checks that no weight of the model at `path` is `missing`.  Raises: ModelError."""
    if missing:
        found = f"lacks {len(missing)} weights of {type(model).__name__}, such as {min(missing)}: they would be random"
        change = "fetch the folder again, or name one whose weights fit its config.json"
        raise ModelError(f"{path}", found, "", change)


class MisfitError(WeightSyncError):
    """Raised for weights that do not fit the rollout's model: they belong to another model."""


def fitting(weights: Iterable[tuple[str, torch.Tensor]], model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the weights one by one, after checking each against a rollout's `model`, which may be on meta.

    Raises: MisfitError for a weight that the model lacks or has in another shape, and at the end if some are missing,
    buffers aside; the errors of `weights`."""
    own, left = stored_tensors(model), dict(model.named_parameters())
    for name, weight in weights:
        if name not in own or own[name].shape != weight.shape:
            has = f"{name} of {list(own[name].shape)}" if name in own else f"no {name}"
            found = f"shape {list(weight.shape)} came for a rollout whose model has {has}"
            raise MisfitError(name, found, "trainer and rollout of the same model", "let both load model.path")
        left.pop(name, None)
        yield name, weight
    if left:
        found = f"{len(left)} of {len(own)} did not come, such as {next(iter(left))}"
        raise MisfitError("weights", found, "all weights of the model, named by the training engine")


def load_value_model(path: str | Path, **options: Any) -> ValueModel:
    """Loads a value model: the body of the language model at `path` with a new value head. `options` are as in
    `load_policy`.  Raises: ModelError."""
    return _value_model(load_policy(path, **options))


def load_reward_model(
    path: str | Path, *, new_head_seed: int | None = None, allow_pickle: bool = False, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Loads the sequence classifier with one label at `path` in float32, with whet's attention and without dropout.

    With `new_head_seed` a causal language model is accepted and gets a new head from this seed.  Raises: ModelError."""
    config = reward_config(path, is_new=new_head_seed is not None, trust_remote_code=trust_remote_code)
    check_weights(path, allow_pickle=allow_pickle)
    with reading(path, NO_CLASSIFIER), _without_report():
        kind = AutoModelForSequenceClassification
        model, missing = _load_whole(kind, str(path), config, allow_pickle, trust_remote_code)
        _check_causal(model)
    if new_head_seed is not None and HEAD in missing:
        missing.remove(HEAD)
        with torch.no_grad():
            model.get_parameter(HEAD).copy_(new_head(model.get_parameter(HEAD).shape, new_head_seed))
    check_complete(model, path, missing)
    check_finite(model, path)
    _prepare(model, path)
    return model


@contextmanager
def _without_report() -> Iterator[None]:
    """Hides transformers' report of missing weights inside the block. New heads are expected, and whet checks other
    weights itself."""
    reports = logging.getLogger("transformers.modeling_utils")

    def is_shown(record: logging.LogRecord) -> bool:
        return record.levelno > logging.WARNING

    reports.addFilter(is_shown)
    try:
        yield
    finally:
        reports.removeFilter(is_shown)


def _check_causal(model: PreTrainedModel) -> None:
    if not isinstance(model, RewardModel):
        raise ValueError(f"{type(model).__name__} has another head, or reads a text in both directions")


def new_head(shape: torch.Size, seed: int) -> torch.Tensor:
    """Draws the initial weight [1, H] of a reward model's head: normal with deviation 1 / sqrt(H + 1).

    Stiennon et al. 2020, https://arxiv.org/abs/2009.01325."""
    draw = torch.Generator().manual_seed(key(seed, "reward head"))
    return torch.randn(*shape, generator=draw, device="cpu") / (shape[1] + 1) ** 0.5


def is_classifier(config: Any) -> bool:
    """Tells whether a transformers config belongs to a sequence classifier."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


def reward_config(path: str | Path, *, is_new: bool = False, trust_remote_code: bool = False) -> Any:
    """Loads the config of the reward model at `path`. With `is_new` the model is still to be trained, and may be a
    causal language model.  Raises: ModelError for a model without a head, or with another number of labels than 1."""
    base, adapters = split_adapters(path)
    if adapters:
        change = "export the merged model first (`whet export`), and name its folder"
        raise ModelError(f"{path}", f"is an adapter for {base}", "a whole model, as a reward model is one", change)
    config = load_config(path, trust_remote_code=trust_remote_code)
    found = ", ".join(config.architectures or ["a model of no known architecture"])
    advice = "train one with `whet train-reward`, or name another model"
    if is_classifier(config):
        if config.num_labels != 1:
            expected, change = "one label, its score", "start from a language model" if is_new else advice
            raise ModelError(f"{path}", f"is a classifier ({found}) of {config.num_labels} labels", expected, change)
    elif not is_new:
        expected = "the weights of a sequence classifier with one label"
        raise ModelError(f"{path}", f"is {found}, which has no classification head", expected, advice)
    config.num_labels = 1
    return config


def outline(
    path: str | Path, *, is_value_model: bool = False, is_reward_model: bool = False, trust_remote_code: bool = False
) -> TrainedModel:
    """Builds the module of `load_policy`, `load_value_model` or `load_reward_model` from the config alone, without
    weights. Call it under `torch.device("meta")`, so that it takes no memory.  Raises: ModelError."""
    if is_reward_model:
        config, kind = reward_config(path, is_new=True, trust_remote_code=trust_remote_code), NO_CLASSIFIER
    else:
        config = load_config(path, trust_remote_code=trust_remote_code)
        kind = "is not the config of a causal language model"
        encoders = load_encoders(split_adapters(path)[0], config, trust_remote_code=trust_remote_code)
    with reading(path, kind):
        auto: Any = AutoModelForSequenceClassification if is_reward_model else _class_of(encoders)
        options = {"trust_remote_code": trust_remote_code, **_options()}
        model: PreTrainedModel = _with_attention(partial(auto.from_config, **options), config)
        if is_reward_model:
            _check_causal(model)
    _prepare(model, path)
    if not is_reward_model:
        attach(model, encoders)
    return _value_model(model) if is_value_model else model


def body_of(model: torch.nn.Module) -> PreTrainedModel:
    """Returns the transformers model inside a policy or a value model."""
    body = model.body if isinstance(model, ValueModel) else model
    assert isinstance(body, PreTrainedModel)
    return body


def torch_dtype(name: str) -> torch.dtype:
    """Returns the torch dtype of a config's dtype name. (`with_dtypes` has already replaced `auto`.)"""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def stored_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the tensors of a model's files, by name: parameters (tied weights once), then the buffers in files."""
    return {**dict(model.named_parameters()), **kept_buffers(model)}


def kept_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the buffers that a model's files have, by name, such as the biases that balance a router (DeepSeek-V3).
    They have no gradient, and keep their dtype."""
    return {
        f"{owner}.{name}": buffer
        for owner, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def rollout_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the tensors that a rollout gets, by name: parameters, then biases of routers that are buffers."""
    biases = {name: nn.Buffer(each) for name, each in kept_buffers(model).items() if name.endswith(ROUTER_BIASES)}
    return {**dict(model.named_parameters()), **biases}


def router_biases(model: torch.nn.Module) -> list[torch.Tensor]:
    """Lists the biases [E] that balance routers, in the order of layers: a router adds its bias to the scores by which
    it chooses experts. Empty for most models."""
    return [tensor for name, tensor in stored_tensors(model).items() if name.endswith(ROUTER_BIASES)]


def cast_weights(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Casts weights to `dtype`. Buffers, such as rotary frequencies, keep their dtype."""
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)


def recompute_activations(model: torch.nn.Module) -> None:
    """Switches on activation checkpointing: a layer saves only its input for the backward pass."""
    body = body_of(model)
    # transformers renames the method between 5.17 and 6
    name = "activation_checkpointing_enable"
    getattr(body, name if hasattr(body, name) else "gradient_checkpointing_enable")()


def layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Lists the model's layers: the modules in its outermost ModuleLists, in order."""
    found: list[torch.nn.Module] = []
    for child in model.children():
        found.extend(child if isinstance(child, torch.nn.ModuleList) else layers(child))
    return found


def _prepare(model: PreTrainedModel, path: str | Path) -> None:
    """Chooses whether whet's own way or the general way runs the model; removes dropout and noise; fuses modules."""
    _remove_noise(model)
    own = model.config.get_text_config()._attn_implementation == attention.NAME
    lacks = lack_of(model, path) if own else "attention that transformers cannot replace"
    if lacks:
        general.use_own_attention(model)
    check = general.checked_small if model.device.type == "meta" else general.checked
    set_support(model, check(model, path, lacks) if lacks else Support())
    fuse(model)
    for bias in router_biases(model):  # transformers loads ERNIE's as trained weights
        bias.requires_grad_(False)
    if not lacks:
        keep_latents(model)
        follow_rows(model)


def _remove_noise(model: PreTrainedModel) -> None:
    """Sets dropout and router noise to 0. A router that samples experts in training (PhiMoE's) stays in evaluation
    mode, in which it takes the best experts."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or name in NOISE):
                setattr(module, name, 0.0)
        if "router_jitter_noise" in vars(module):
            module.training, vars(module)["train"] = False, _stay


def _stay(mode: bool = True) -> None:
    """Does nothing. It replaces the method `train` of a module that must stay in evaluation mode."""


def _value_model(model: PreTrainedModel) -> ValueModel:
    body = language_body(model)
    assert isinstance(body, PreTrainedModel)
    return ValueModel(body)


def load_tokenizer(path: str | Path, *models: str | Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Loads the tokenizer at `path`, or of an adapter's base. If it has no padding token, it pads with its end token.

    It gets the encoders of the first of `models`, or of the model at `path` (`encoders_of`).  Raises: ModelError, also
    if one of `models` has fewer embedding rows than the tokenizer has tokens."""
    base, adapters = split_adapters(path)
    require_model(base)
    own = [adapter for adapter in adapters if (Path(adapter) / "tokenizer_config.json").is_file()]
    options = {"config": load_config(base, trust_remote_code=trust_remote_code)} if own else {}
    with reading(path, "has no tokenizer that could be loaded"):
        with suppress(OSError):  # a folder with only a tokenizer has no config
            _check_sizes(base, PreTrainedConfig.get_config_dict(base)[0])
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            own[-1] if own else base, trust_remote_code=trust_remote_code, **options
        )
        needed = max(tokenizer.get_vocab().values()) + 1
    if tokenizer.eos_token_id is None:
        found = "has no end token: no response would end"
        raise ModelError(f"tokenizer at {path}", found, "", "set eos_token in its config")
    if tokenizer.pad_token_id is None:
        log.info("the tokenizer at %s has no padding token; its end token %r pads", path, tokenizer.eos_token)
        tokenizer.pad_token = tokenizer.eos_token
    for model in models:
        rows = load_config(model, trust_remote_code=trust_remote_code).get_text_config().vocab_size
        if rows < needed:
            found = f"has token ids up to {needed - 1}, and the model at {model} only {rows} embedding rows"
            change = "name the tokenizer that belongs to the model (model.tokenizer_path)"
            raise ModelError(f"tokenizer at {path}", found, "", change)
    attach(tokenizer, _encoders_at(models[0] if models else base, trust_remote_code))
    return tokenizer


def _encoders_at(path: str | Path, trust_remote_code: bool) -> Encoders | None:
    """Loads the encoders of the model at `path`; None for a text model and for a folder with only a tokenizer."""
    base, _ = split_adapters(path)
    with suppress(OSError):
        if names_of(PreTrainedConfig.get_config_dict(base)[0].get("model_type", "")):
            config = load_config(base, trust_remote_code=trust_remote_code)
            return load_encoders(base, config, trust_remote_code=trust_remote_code)
    return None


def load_config(path: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Loads the transformers config at `path`, or of an adapter's base.  Raises: ModelError."""
    path, _ = split_adapters(path)
    require_model(path)
    with reading(path, "has no readable model config"):
        _check_sizes(path, PreTrainedConfig.get_config_dict(path)[0])  # before an object is made of the raw values
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        return config


def _check_sizes(path: str, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, dict):
            _check_sizes(path, value)
        for size in as_list(value) if name in LARGEST and value is not None else []:
            if type(size) is not int or not 1 <= size <= LARGEST[name]:
                expected = f"a whole number from 1 to {LARGEST[name]:,} in its config.json"
                raise ModelError(f"{path}: {name}", size, expected, "correct it, or fetch the folder again")


def context_length(path: str | Path, *, trust_remote_code: bool = False) -> int:
    """Returns the maximum number of positions of the model at `path`.  Raises: ModelError."""
    return num_positions(load_config(path, trust_remote_code=trust_remote_code))


def num_positions(config: Any) -> int:
    """Returns the maximum number of positions of a model with this transformers config; NO_LIMIT if it has none."""
    return int(getattr(config.get_text_config(), "max_position_embeddings", NO_LIMIT))


def load_generation_config(path: str | Path) -> GenerationConfig | None:
    """Loads the generation config at `path`, or of an adapter's base; None without one.

    Raises: ModelError if it cannot be read."""
    path, _ = split_adapters(path)
    with reading(path, "has a generation_config.json that cannot be read"):
        try:
            config: GenerationConfig = GenerationConfig.from_pretrained(path)
        except OSError as error:
            if "valid JSON" in str(error):
                raise
            return None
        eos = config.eos_token_id
        if not all(isinstance(end, int | None) for end in as_list(eos)):
            change = "correct the file, or fetch the folder again"
            raise ModelError(f"{path}: generation_config.json: eos_token_id", eos, "whole numbers", change)
    return config


def stop_token_ids(
    path: str | Path, tokenizer: PreTrainedTokenizerBase, chat: Mapping[str, Any] | None = None
) -> tuple[int, ...]:
    """Returns the token ids that end a response: the end tokens of the tokenizer, of the model's generation config, and
    of the chat template with the arguments `chat`."""
    found = {tokenizer.eos_token_id, end_of_turn(tokenizer, chat)}
    generation = load_generation_config(path)
    if generation is not None:
        eos = generation.eos_token_id
        found.update(as_list(eos))
    return tuple(sorted(token for token in found if token is not None))


@contextmanager
def without_weight_bars() -> Iterator[None]:
    """Hides transformers' progress bars over tensors and files inside the block. Downloads keep their bars."""
    before = set_tqdm_hook(lambda bar, args, kwargs: bar(*args, **{**kwargs, "disable": True}))
    try:
        yield
    finally:
        set_tqdm_hook(before)


class ValueModel(nn.Module):
    """A value model: V(state) = head . hidden state. The head starts at 0, so a new critic predicts 0 everywhere."""

    def __init__(self, body: PreTrainedModel) -> None:
        super().__init__()
        self.body = body
        self.value_head = nn.Linear(body.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def values(self, hidden: torch.Tensor) -> torch.Tensor:
        """Computes values in float32: [N, H] -> [N]."""
        return self.value_head(hidden).squeeze(-1).float()


TrainedModel = PreTrainedModel | ValueModel
