# SPDX-License-Identifier: Apache-2.0
"""The general way to compute a model: transformers' own forward and cache, over padded rows.

Rows begin at the left edge and are padded on their right. A causal model reads its tokens in order, so that padding
behind a row changes none of its states, be they from attention, a convolution or a recurrence. A model is tried on a
few tokens when it is loaded: each row must be as it is alone.
"""

from __future__ import annotations

import inspect
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from whet.errors import ModelError
from whet.models.encoders.base import body_of
from whet.models.folder import reading
from whet.models.log_probs import LogitForm
from whet.models.supported import Support

LOST = "packed rows, prompts that rows share, the native rollout, batch_invariant"
TOKENS, PADDING = 6, 3  # of the rows on which a model is tried
TOLERANCE = 1e-3  # of the largest state: more than rounding, less than a token that is seen where it must not be


def forward(module: nn.Module, **arguments: Any) -> Any:
    """Calls a module of transformers with those of the arguments that it takes."""
    taken = _taken(type(module))
    return module(**(arguments if taken is None else {name: arguments[name] for name in arguments if name in taken}))


def cache_argument(module: nn.Module) -> str:
    """The name by which a language model takes its cache."""
    return "cache_params" if "cache_params" in inspect.signature(type(module).forward).parameters else "past_key_values"


@cache
def _taken(kind: Any) -> frozenset[str] | None:
    """The names of a forward's arguments; None where it takes any."""
    parameters = inspect.signature(kind.forward).parameters.values()
    is_open = any(each.kind == inspect.Parameter.VAR_KEYWORD for each in parameters)
    return None if is_open else frozenset(each.name for each in parameters)


def use_own_attention(model: Any) -> None:
    """Gives a model made with whet's attention that of transformers."""
    if model.config.get_text_config()._attn_implementation not in ("sdpa", "eager"):
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")


@torch.no_grad()
def tried(model: Any, path: str | Path, lacks: str) -> Support:
    """The way of a model that `lacks` a part of the own one, after a few tokens through its forward.

    Raises: ModelError where padding or later tokens change a row, or where the logits are not those of the head."""
    training, body = model.training, body_of(model)
    model.eval()
    with reading(path, f"has {lacks}, and transformers' own forward, which would compute it, fails"):
        ids = torch.arange(3, 3 + TOKENS)[None] % model.config.get_text_config().vocab_size
        ids = torch.cat([ids, ids.flip(1)])
        alone = _states(body, ids[:1, :-PADDING])
        padded, on_left = ids.clone(), ids.clone()
        padded[0, -PADDING:], on_left[0] = 0, ids[0].roll(PADDING)
        on_left[0, :PADDING] = 0
        is_causal = _same(_states(body, ids)[:1, :-PADDING], alone)
        is_exact = _same(_states(body, padded, padded != 0)[:1, :-PADDING], alone)
        pads_left = _same(_states(body, on_left, on_left != 0)[:1, PADDING:], alone)
        head = model.get_output_embeddings()
        form = LogitForm.of(model.config.get_text_config())
        has_head = head is None or _same(form(head(alone)), model(input_ids=ids[:1, :-PADDING]).logits)
    model.train(training)
    for is_right, found in (
        (is_causal, "states of a token that depend on later ones"),
        (is_exact, "states that padding behind a row changes"),
        (has_head, "logits that are not its output layer's, scaled or capped as its config says"),
    ):
        if not is_right:
            expected = "a causal language model, whose rows can be padded on their right"
            raise ModelError(f"{path}", f"is a {type(model).__name__} with {found}", expected, "choose another model")
    return Support(lacks, pads_left)


def _states(body: nn.Module, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    mask = torch.ones_like(ids) if mask is None else mask.long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    out = forward(body, input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
    states: torch.Tensor = out.last_hidden_state
    return states


def _same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).abs().max() <= TOLERANCE * expected.abs().max())
