# SPDX-License-Identifier: Apache-2.0
"""Decides in which way whet runs a model. whet's own way uses whet's attention on packed rows and a block cache. The
general way, for models with other layers, uses transformers' own forward over padded rows (`models.general`).

A model runs in whet's own way if `_unsupported` finds nothing. To support a new kind of layers, extend whet's attention
and caches first, then `LAYER_TYPES`, `ARGUMENTS` or `_unsupported`."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as ENCODERS

from whet.errors import ModelError
from whet.kernels.attention import Scores
from whet.models.caches import LINEAR, Pages, layer_caches
from whet.models.encoders.base import body_of
from whet.models.linear_attention import is_followed

log = logging.getLogger(__name__)
INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # the name by which transformers' modules call whet's attention
OF_ATTENTION = ("num_attention_heads", "max_position_embeddings")
LAYER_TYPES = {"full_attention", "sliding_attention", LINEAR}
# Arguments of attention that whet supports, or may ignore, because it makes its masks itself.
ARGUMENTS = {"scaling", "sliding_window", "softcap", "dropout", "attention_mask", "position_ids", "output_attentions"}
ARGUMENTS |= {"s_aux", "is_causal", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
NAMED = {"position_bias": "a bias by position in attention"}
NAMED |= {"indices": "sparse attention", "block_indices": "sparse attention"}
# Unsupported parts that are not visible in the calls of attention, by type of model.
BY_TYPE = {"mpt": "a bias by position in its mask", "modernbert-decoder": "windows counted from both sides"}
ENOUGH = 8  # calls of attention to check: later layers repeat the kinds of earlier layers
_FOUND: dict[tuple[type, str], str] = {}  # by model: the result of `lack_of`


@dataclass(frozen=True)
class Support:
    """The way in which whet runs a model (its own or the general way), and the properties of this way."""

    lacks: str = ""  # the part of the model that whet's own way does not support; "" if it supports all parts
    pads_left: bool = True  # masked padding on the left changes no row, so rows of any lengths are sampled together
    caches: bool = True  # transformers' cache is exact, so that each token is computed once

    @property
    def is_own(self) -> bool:
        """True if whet's attention on packed rows runs the model, False if transformers' own forward runs it."""
        return not self.lacks


def support_of(model: Any) -> Support:
    """Returns the way in which whet runs a model that `load_policy` or a similar function loaded."""
    found = getattr(body_of(model), "support", None)
    return found if isinstance(found, Support) else Support()


def set_support(model: Any, support: Support) -> None:
    """Stores `support` in the model, for `support_of`."""
    vars(body_of(model))["support"] = support


def lack_of(model: Any, path: str | Path) -> str:
    """Names the part of a transformers model, made with whet's attention, that whet's own way does not support; "" if
    it supports all.  Raises: ModelError for a model that is no language model."""
    config = model.config.get_text_config()
    if config.model_type in ENCODERS:
        found = f"is a {type(model).__name__} with attention in both directions (it is an encoder)"
        raise ModelError(f"{path}", found, "a causal language model", "choose another model (docs/models.md)")
    if {*(config.to_dict().get("layer_types") or ())} == {LINEAR}:
        found = f"is a {type(model).__name__} with linear attention in all its layers"
        expected = "at least one layer with keys and values, because caches count tokens by it"
        raise ModelError(f"{path}", found, expected, "choose another model (docs/models.md)")
    kind = (type(model), config.to_json_string())
    if kind not in _FOUND:
        _FOUND[kind] = next(_unsupported(model, config), "")
    return _FOUND[kind]


def _unsupported(model: Any, config: Any) -> Iterator[str]:
    """Yields descriptions of the model's unsupported parts, the most informative one first."""
    values = config.to_dict()
    if config.model_type in BY_TYPE:
        yield BY_TYPE[config.model_type]
    if missing := [name for name in OF_ATTENTION if not hasattr(config, name)]:
        yield f"no {' and no '.join(missing)} in its config"
    types = {str(each) for each in values.get("layer_types") or ()}
    if others := sorted(types - LAYER_TYPES):
        yield f"layers of the type {' and '.join(others)}"
    if values.get("num_kv_shared_layers"):
        yield f"{values['num_kv_shared_layers']} layers that use the keys and values of other layers"
    decoder = model.get_decoder()
    stacks = [(name, child) for name, child in decoder.named_children() if isinstance(child, nn.ModuleList)]
    parts = [(f"{stack}.{name}", part) for stack, layers in stacks for name, part in layers.named_modules()]
    linear = [each for each in layer_caches(config) if not isinstance(each, Pages)]
    followed = {name: part for name, part in parts if is_followed(part)}
    channels = [part.get_submodule("conv1d").in_channels for part in followed.values()]
    if channels != [each.channels for each in linear]:
        yield "linear attention of a kind that whet does not compute"
    inside = [f"{name}.conv1d" for name in followed]
    if mixers := [name for name, part in parts if isinstance(part, nn.Conv1d) and name not in inside]:
        yield f"a convolution over tokens ({mixers[0]})"
    for module in decoder.modules():
        code = inspect.unwrap(type(module).forward).__code__
        if INTERFACE in code.co_names:
            constants = [each for each in code.co_consts if isinstance(each, tuple) and "scaling" in each]
            names = {name for each in constants for name in each}
            for name in sorted(names - ARGUMENTS):
                yield f"{NAMED.get(name, 'attention by ' + name)} ({name} in {type(module).__name__})"
            if "sliding_attention" in types and "sliding_window" not in names:
                yield f"windows that {type(module).__name__} does not pass to attention"
    yield from _unsupported_calls(decoder, config)


class _EnoughError(Exception):
    """Ends a trial pass after enough calls of attention."""


def _unsupported_calls(decoder: Any, config: Any) -> Iterator[str]:
    """Runs a token through the model with fake tensors. Yields reasons why calls of attention do not fit a cache."""
    calls, is_counted = list[tuple[int, torch.Size, torch.Size, torch.Size]](), False

    def attend(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: Scores) -> torch.Tensor:
        calls.append((module.layer_idx, query.shape[1:], key.shape[1:], value.shape[1:]))
        if len(calls) == ENOUGH:
            raise _EnoughError
        return query.new_zeros(*query.shape[:2], value.shape[2])

    tensors, mode = [*decoder.named_parameters(), *decoder.named_buffers()], FakeTensorMode(allow_non_fake_inputs=True)
    empty = {name: torch.empty_like(each, device="meta") for name, each in tensors}  # else the mode keeps the weights
    with torch.no_grad(), mode, torch.device("cpu"), _silent(logging.getLogger("torch._subclasses.fake_tensor")):
        fakes: dict[str, torch.Tensor] = {
            name: FakeTensor(mode, shape, torch.device("cpu")) for name, shape in empty.items()
        }
        at = {name: torch.zeros(1, 1, dtype=torch.long) for name in ("input_ids", "position_ids")}
        paged = SimpleNamespace(attend=attend)  # a `PagedContext` without a cache
        try:
            with suppress(_EnoughError):
                functional_call(decoder, fakes, kwargs={**at, "use_cache": False, "paged": paged})
            is_counted = True
        except Exception as error:  # the code of a model may raise anything
            log.debug("the calls of attention could not be counted: %r", error)
    pages = {number: each for number, each in enumerate(layer_caches(config)) if isinstance(each, Pages)}
    for layer, query, key, value in calls:
        told = pages.get(layer, Pages(0, 0, 0))
        announced = (told.heads, told.key_size), (told.heads, told.value_size)
        if not ((key, value) == announced and query[1:] == key[1:]):
            shapes = [" x ".join(map(str, each)) for each in (query, key, value, *announced)]
            yield (
                f"queries of {shapes[0]}, keys of {shapes[1]} and values of {shapes[2]} numbers (heads x size) in "
                f"layer {layer}, where its config announces keys of {shapes[3]} and values of {shapes[4]}"
            )
    called = [each[0] for each in calls]
    if is_counted and called != list(pages)[:ENOUGH]:
        found = f"in the layers {', '.join(map(str, called))}" if called else "nowhere"
        yield f"calls of whet's attention {found}, where each of {len(pages)} layers must make one"


@contextmanager
def _silent(logger: logging.Logger) -> Iterator[None]:
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
