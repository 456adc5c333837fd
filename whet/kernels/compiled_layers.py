# SPDX-License-Identifier: Apache-2.0
"""Compiles each kind of layer once, forward and backward, for all layers of a model and for rows of any length."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from whet.errors import EngineError

log = logging.getLogger(__name__)
# A kind of layer is compiled with and without gradients, for training and for sampling, with and without a window.
MOST_VARIANTS = 32


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Compiles each layer of a model at its first call. A kind of layer that torch cannot compile runs uncompiled, with
    one line in the log. So does a layer with adapted experts, silently: peft makes a class in each pass, which torch
    would compile again."""
    for number, layer in enumerate(layers):
        if "forward" not in vars(layer) and not any(hasattr(each, "parameter_name") for each in layer.modules()):
            # a deepcopy of the layer also copies this object, which then calls the copied layer
            layer.forward = CompiledForward(layer, number)  # type: ignore[assignment]


class CompiledForward:
    """The compiled forward pass of one layer. Layers of a kind share the code, which does not contain their number."""

    def __init__(self, layer: nn.Module, number: int) -> None:
        self.layer, self.number = layer, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kind, paged = type(self.layer), kwargs.get("paged")
        if paged is not None:
            if not paged.compiles:
                return kind.forward(self.layer, *args, **kwargs)
            kwargs["paged"] = paged.layer(self.number)
        run = partial(_run, kind, self.layer, **kwargs)
        if _checkpoints_outside() and self.layer.training and getattr(self.layer, "gradient_checkpointing", False):
            checkpoint: Any = self.layer._gradient_checkpointing_func
            return checkpoint(run, *args)  # the backward pass computes the whole compiled layer again
        return run(*args)


def _run(kind: Any, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if kind in _refused:
        return _plain(kind)(layer, *args, **kwargs)
    packed = kwargs.get("packed")
    try:  # attention bunch by bunch (`packing.Bunch`) is not compiled, only the code around it
        return _compiled(kind, packed is None or packed.stretches is not None)(layer, *args, **kwargs)
    except torch._dynamo.exc.FailOnRecompileLimitHit as error:
        found = f"was compiled {MOST_VARIANTS} times, and a call needs another variant and would run slowly: {error}"
        raise EngineError(kind.__name__, found, "", "set engine.options.compile=false") from error
    except torch._dynamo.exc.TorchDynamoException as error:
        log.warning("%s cannot be compiled and runs uncompiled, which is slower: %s", kind.__name__, str(error)[:500])
        _refused.add(kind)
        return _plain(kind)(layer, *args, **kwargs)


_refused: set[type[nn.Module]] = set()


@cache
def _compiled(kind: Any, is_whole: bool) -> Callable[..., Any]:
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_VARIANTS)
    compiled: Callable[..., Any] = torch.compile(_plain(kind), dynamic=True, fullgraph=is_whole)
    return compiled


def _plain(kind: Any) -> Callable[..., Any]:
    """Returns the class's forward function without the wrapper for gradient checkpointing."""
    forward = kind.forward
    return getattr(forward, "__wrapped__", forward) if _checkpoints_outside() else forward


@cache
def _checkpoints_outside() -> bool:
    """Tells whether transformers wraps a layer's `forward` for gradient checkpointing. Older versions wrap its call."""
    return "__call__" not in vars(GradientCheckpointingLayer)
