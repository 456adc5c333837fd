# SPDX-License-Identifier: Apache-2.0
"""The routers of a mixture of experts: how they route the sampled tokens, and the loss that balances them.

A router computes logits [tokens, E] and chooses experts. Both are read at the states that predict a sampled token. Only
tokens that the loss reads count: if all tokens of a forward pass counted, packing, padding and micro-batches would
change the numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from whet.models.encoders.base import body_of

PROBS, CHOICES, LOADS = "router_probs", "router_choices", "router_loads"  # names of model outputs
ROUTER_OUTPUTS = frozenset({PROBS, CHOICES, LOADS})
Recorded = list[tuple[torch.Tensor, torch.Tensor]]  # by layer with experts: logits [tokens, E], choices [tokens, k]


def auxiliary_coefficient(config: Any) -> float:
    """Returns the factor of the routers' auxiliary loss; 0 unless the model's config requests the loss by
    `output_router_logits`."""
    values = config.get_text_config().to_dict()
    coefficient = values.get("router_aux_loss_coef") or values.get("aux_loss_alpha") or 0.0
    return float(coefficient) if values.get("output_router_logits") else 0.0


def routers_of(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """Lists the routers of a model in the order of its layers, each with the index of the logits in its output."""
    body = body_of(model)
    recorder: Any = getattr(body, "_can_record_outputs", None) or {}
    recorder = recorder.get("router_logits")
    kind, index = getattr(recorder, "target_class", recorder), getattr(recorder, "index", 0)
    part = getattr(recorder, "layer_name", None) or ""
    if kind is None:
        return []
    return [(each, index) for name, each in body.named_modules() if isinstance(each, kind) and part in name]


@contextmanager
def recorded(model: nn.Module, is_wanted: bool) -> Iterator[Recorded]:
    """Records the outputs of routers inside the block, in the order of layers. Records nothing unless `is_wanted`."""
    found: Recorded = []
    with ExitStack() as hooks:
        for router, index in routers_of(model) if is_wanted else []:
            hooks.callback(router.register_forward_hook(_listener(found, index)).remove)
        yield found


def _listener(found: Recorded, index: int) -> Callable[[nn.Module, object, Any], None]:
    def listen(router: nn.Module, inputs: object, output: Any) -> None:
        logits = output[index]
        chosen = [each for each in output if not each.is_floating_point()]  # Llama 4 gives none, and uses the best
        found.append((logits, chosen[-1] if chosen else logits.argmax(-1, keepdim=True)))

    return listen


def mean_probs(found: Recorded, at: torch.Tensor) -> torch.Tensor:
    """Averages each expert's probability over layers, at the tokens with the indices `at` [N].  [N, E]"""
    return torch.stack([_rows(logits, at).float().softmax(-1) for logits, _ in found]).mean(0)


@torch.no_grad()
def mean_choices(found: Recorded, at: torch.Tensor) -> torch.Tensor:
    """Averages over layers how often each token with an index in `at` is routed to each expert.  [N, E]"""
    return torch.stack([_counts(logits, chosen, at) for logits, chosen in found]).mean(0)


@torch.no_grad()
def loads(found: Recorded, at: torch.Tensor) -> torch.Tensor:
    """Counts for each layer how often tokens are routed to each expert; appends the summed entropy of router
    probabilities, in nats, and the number of tokens. `at` indexes the tokens that count.  [L, E + 2]"""
    by_layer = []
    for logits, chosen in found:
        log_probs = _rows(logits, at).float().log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum()
        ends = torch.stack([entropy, entropy.new_tensor(len(at))])
        by_layer.append(torch.cat([_counts(logits, chosen, at).sum(0), ends]))
    return torch.stack(by_layer)


def _counts(logits: torch.Tensor, chosen: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return F.one_hot(_rows(chosen, at), logits.shape[-1]).sum(-2).float()


def _rows(values: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return values.flatten(0, -2).index_select(0, at)
