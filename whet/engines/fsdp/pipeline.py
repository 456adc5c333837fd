# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages: slices of a model's layers, run by torch.distributed.pipelining. The last stage computes the loss.

A stage has the model's own modules, with `Absent` in place of modules of other stages, so weights keep their names."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from whet.devices import HOST
from whet.errors import ConfigError
from whet.models.load import body_of, layers
from whet.models.outputs import ForwardSettings, layout_of, states_of, tokens_of
from whet.models.routers import auxiliary_coefficient

KEY = "engine.options.mesh.pipeline"
Run = Callable[[int, torch.Tensor | None], torch.Tensor]  # micro-batch number, hidden states -> hidden states or loss


class Absent(nn.Module):
    """A placeholder for a module of another stage. Returns the hidden states unchanged."""

    weight = None

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Returns the hidden states unchanged."""
        return hidden


class Receives(Absent):
    """Replaces the embedding in later stages: ignores tokens, and returns the received hidden states."""

    hidden: torch.Tensor

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Returns the received hidden states."""
        return self.hidden


def stages_of(model: nn.Module, count: int, own: Sequence[int]) -> tuple[nn.Module, list[nn.Module]]:
    """Returns the model with only the stages `own` of `count`, and the list of these stages.  Raises: ConfigError."""
    body, listed = body_of(model), layers(body_of(model))
    config = body.config
    if config.get_text_config() is not config or config.tie_word_embeddings:
        what = "ties its output to its embedding, which another stage has" if config.tie_word_embeddings else "sees"
        raise ConfigError(KEY, count, f"1, as {type(body).__name__} {what}", "set it to 1")
    if auxiliary_coefficient(config):
        raise ConfigError(KEY, count, "1 with the auxiliary loss of routers (output_router_logits)", "set it to 1")
    if count > len(listed):
        raise ConfigError(KEY, count, f"at most {len(listed)} stages, one for a layer", "lower it")
    base, embedding = body.base_model, body.get_input_embeddings()
    owner = {id(embedding): 0} | {id(each): number * count // len(listed) for number, each in enumerate(listed)}
    holders = [base] if model is base else [base, *(each for each in (model, body) if each is not base)]
    outside = {id(module): module for holder in holders for module in holder.children()}
    for number, module in outside.items():
        is_end = module is not base and module is not body and any(True for _ in module.parameters())
        if is_end and number not in owner and not isinstance(module, nn.ModuleList):
            owner[number] = count - 1
    others = [name for name, module in base.named_children() if id(module) in owner and module is not embedding]
    if len(others) > 1 or not _passes_on(model, owner):
        what = "has other weights before its layers" if len(others) > 1 else "changes hidden states before its layers"
        raise ConfigError(KEY, count, f"1, as {type(body).__name__} {what} or after them", "set it to 1")

    def only(kept: Sequence[int]) -> nn.Module:
        return _without(model, [each for each, stage in owner.items() if stage not in kept])

    return only(own), [only([stage]) for stage in own]


def _without(model: nn.Module, gone: Iterable[int]) -> nn.Module:
    """Copies a model without the modules `gone`, by id."""
    embedding = id(body_of(model).get_input_embeddings())
    return replaced(model, {each: Receives() if each == embedding else Absent() for each in gone})


@torch.no_grad()
def _passes_on(model: nn.Module, parts: Iterable[int]) -> bool:
    """Tells whether a model without embedding, layers and ends, the `parts`, returns received hidden states unchanged.
    (Granite multiplies the embedding's output in its body, and so each stage would multiply again.)"""
    rest, settings = _without(model, parts), ForwardSettings()
    body: Any = body_of(rest)
    device, one = next((each.device for each in body.buffers()), HOST), torch.ones(1, 4, dtype=torch.long)
    columns = {"input_ids": one, "attention_mask": one, "position_ids": one.cumsum(1) - 1, "response_mask": one[:, 1:]}
    where = layout_of(columns, settings).to(device)
    hidden = torch.linspace(-1, 1, body.config.hidden_size, device=device).expand(1, tokens_of(where, settings), -1)
    try:
        body.get_input_embeddings().hidden = hidden
        return states_of(rest, where, settings).equal(hidden[0])
    except (RuntimeError, TypeError, AttributeError):  # the body reads a module that is gone
        return False


def replaced(module: nn.Module, table: Mapping[int, nn.Module]) -> nn.Module:
    """Copies a module with some submodules replaced. `table` has the replacements by id; other weights are shared."""
    if id(module) in table:
        return table[id(module)]
    children = {name: replaced(child, table) for name, child in module.named_children()}
    if all(children[name] is child for name, child in module.named_children()):
        return module
    made = copy.copy(module)
    made._modules = {**module._modules, **children}
    return made


class _Stage(nn.Module):
    """Wraps a stage in the form that torch's schedules call. (The stage contains the FSDP modules, so gradients are
    summed over the ranks after each micro-batch.)"""

    def __init__(self, run: Run, is_first: bool) -> None:
        super().__init__()
        self.run, self.is_first = run, is_first

    def forward(self, hidden: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        """Returns the hidden states after this stage; the last stage returns the loss of the micro-batch."""
        return self.run(int(number), None if self.is_first else hidden)


def run_schedule(
    runs: Mapping[int, Run],
    count: int,
    shape: tuple[int, int],
    batches: int,
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Runs forward and backward passes of all micro-batches, in turn. `runs` are this rank's stages, by index from 0 to
    `count` - 1; `shape` is the shape of hidden states between stages."""
    hidden, number = torch.zeros(shape, device=device), torch.zeros(1, device=device)
    made = []
    for index, run in runs.items():
        ends = (number if index == 0 else hidden.requires_grad_(), torch.zeros((), device=device).requires_grad_())
        out = ends[1] if index == count - 1 else hidden.requires_grad_()
        made.append(PipelineStage(_Stage(run, index == 0), index, count, device, ends[0], out, group=group))
    numbers, dummy = torch.arange(batches), torch.zeros(batches, device=device)
    options: dict[str, Any] = {"n_microbatches": batches, "loss_fn": lambda loss, _: loss, "scale_grads": False}
    schedule: Any = Schedule1F1B(made[0], **options) if len(made) == 1 else ScheduleInterleaved1F1B([*made], **options)
    args = (dummy,) if 0 in runs else ()
    target = {"target": dummy} if count - 1 in runs else {}
    schedule.step(*args, number=numbers, return_outputs=False, **target)


def padded(hidden: torch.Tensor, tokens: int) -> torch.Tensor:
    """Pads hidden states with zeros at the end: [T, H] -> [tokens, H]."""
    return F.pad(hidden, (0, 0, 0, tokens - len(hidden)))
