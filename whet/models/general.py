# SPDX-License-Identifier: Apache-2.0
"""The general way to run a model: transformers' own forward and cache, over padded rows.

Rows begin at the left edge and are padded on their right. A causal model reads its tokens in order, so padding after a
row does not change the row's states, neither by attention nor by a convolution or a recurrence. When a model is loaded,
this is tested on a few tokens: a row must give the same result in a batch as alone."""

from __future__ import annotations

import inspect
import logging
from contextlib import suppress
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from whet.errors import ModelError
from whet.kernels.log_probs import LogitForm
from whet.models.encoders.base import body_of
from whet.models.folder import reading
from whet.models.supported import Support

log = logging.getLogger(__name__)
_TRIED: dict[tuple[type, str, str], Support] = {}  # by model: the support, if this process has tested a small copy
LOST = "packed rows, prompts that rows share, the native rollout, batch_invariant"
TOKENS, PADDING, DECODED = 6, 3, 2  # of the rows with which a model is tested
LAYERS, TOKEN_IDS, LARGEST = 4, 64, 10**9  # of a small copy: layers, rows of its embedding, and the most weights
TOLERANCE = 1e-3  # relative to the largest state: above rounding errors, below the effect of a wrongly visible token


def forward(module: nn.Module, **arguments: Any) -> Any:
    """Calls a transformers module with the arguments that its forward accepts, and leaves out the others."""
    taken = _taken(type(module))
    return module(**(arguments if taken is None else {name: arguments[name] for name in arguments if name in taken}))


def cache_argument(module: nn.Module) -> str:
    """Returns the name of the cache parameter of a language model's forward."""
    return "cache_params" if "cache_params" in inspect.signature(type(module).forward).parameters else "past_key_values"


def _taken(kind: Any) -> frozenset[str] | None:
    """Returns the parameter names of a forward; None if it accepts any keyword."""
    parameters = inspect.signature(kind.forward).parameters.values()
    is_open = any(each.kind == inspect.Parameter.VAR_KEYWORD for each in parameters)
    return None if is_open else frozenset(each.name for each in parameters)


def use_own_attention(model: Any) -> None:
    """Replaces whet's attention in a model by transformers' attention."""
    text = model.config.get_text_config()
    if text._attn_implementation not in (own := ("sdpa", "eager")):
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    if text._attn_implementation not in own:  # a model with its own attention, which uses this name only for masks
        text._attn_implementation = "eager"


def checked_small(model: Any, path: str | Path, lacks: str) -> Support:
    """Runs `checked` for a model on meta, with a small copy that has random weights, few layers and few embedding rows.
    If no copy can be made, or it would be large, the test is skipped with a line in the log."""
    kind = type(model), model.config.to_json_string(), lacks
    if kind not in _TRIED:
        copy = None
        with suppress(Exception), torch.random.fork_rng(devices=[]):  # transformers may reject the changed config
            torch.manual_seed(0)
            config = _small(model.config)
            with torch.device("meta"):
                size = sum(weight.numel() for weight in type(model)._from_config(config).parameters())
            with torch.device("cpu"):
                copy = type(model)._from_config(config, dtype=torch.float32) if size <= LARGEST else None
        if copy is None:
            log.warning("%s: its forward pass is not tested before training, as no small copy can be made", path)
        with torch.device("cpu"):
            _TRIED[kind] = Support(lacks) if copy is None else checked(copy, path, lacks)
    return _TRIED[kind]


def _small(config: Any) -> Any:
    """Returns the config with few layers and tokens. Lists with an entry for each layer are shortened too."""
    config = deepcopy(config)
    text = config.get_text_config()
    layers, few = text.num_hidden_layers, min(LAYERS, text.num_hidden_layers)
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == layers:
            vars(text)[name] = value[:few]
        if name.endswith("_token_id") and value is not None:
            vars(text)[name] = 0
    text.num_hidden_layers, text.vocab_size = few, min(TOKEN_IDS, text.vocab_size)
    return config


@torch.no_grad()
def checked(model: Any, path: str | Path, lacks: str) -> Support:
    """Tests the general way on a few tokens. `lacks` names the part of the model that whet's own way does not support.
    Returns the support.
    Raises: ModelError if padding or later tokens change a row, or if logits differ from the output layer's results."""
    training, body, config = model.training, body_of(model), model.config.get_text_config()
    model.eval()
    with reading(path, f"has {lacks}, and transformers' own forward, which would compute it, fails"):
        row = torch.arange(3, 3 + TOKENS) % config.vocab_size
        rows, short = torch.stack([row, row.flip(0)]), row[None, :-PADDING]
        mask = torch.ones_like(rows)
        mask[0, -PADDING:] = 0
        alone, whole = _states(body, short), _states(body, rows)
        is_causal = _same(whole[:1, :-PADDING], alone)
        is_exact = _same(_states(body, rows, mask)[:1, :-PADDING], alone)
        left, left_mask = torch.stack([rows[0].roll(PADDING), rows[1]]), mask.flip(1)
        pads_left = _same(_states(body, left, left_mask)[:1, PADDING:], alone)
        caches = False
        with suppress(Exception):  # if a model's cache does not work, the model is sampled without cache
            caches = _same(_decoded(body, rows), whole[:, -DECODED:])
            pads_left &= _same(_decoded(body, left, left_mask)[0], alone[0, -DECODED:])
        head, form = model.get_output_embeddings(), LogitForm.of(config)
        has_head = head is None or _same(form(head(alone)), model(input_ids=short, use_cache=False).logits)
    model.train(training)
    for is_right, found in (
        (is_causal, "states of a token that depend on later ones"),
        (is_exact, "states that padding after a row changes"),
        (has_head, "logits that are not its output layer's, scaled or capped as its config says"),
    ):
        if not is_right:
            expected = "a causal language model, whose rows can be padded on their right"
            raise ModelError(f"{path}", f"is a {type(model).__name__} with {found}", expected, "choose another model")
    return Support(lacks, pads_left, caches)


def _states(body: nn.Module, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    states: torch.Tensor = _forward(body, ids, mask, use_cache=False).last_hidden_state
    return states


def _decoded(body: nn.Module, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Computes the states of the last DECODED tokens one by one, with a cache that holds the earlier tokens."""
    name, states, cache = cache_argument(body), list[torch.Tensor](), None
    for start, stop in pairwise([0, *range(TOKENS - DECODED, TOKENS + 1)]):
        seen = None if mask is None else mask[:, :stop]
        out = _forward(body, ids[:, :stop], seen, start, use_cache=True, **{name: cache})
        states, cache = [*states, out.last_hidden_state[:, -1]], out[name]
    return torch.stack(states[1:], 1)


def _forward(body: nn.Module, ids: torch.Tensor, mask: torch.Tensor | None, start: int = 0, **options: Any) -> Any:
    """Runs the forward pass of `body` for the tokens from `start` on; earlier tokens are in the cache."""
    positions = ((torch.ones_like(ids) if mask is None else mask).cumsum(1) - 1).clamp(min=0)
    read = {"input_ids": ids[:, start:], "attention_mask": mask, "position_ids": positions[:, start:]}
    return forward(body, **read, **options)


def _same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).abs().max() <= TOLERANCE * expected.abs().max())
