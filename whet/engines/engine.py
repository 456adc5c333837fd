# SPDX-License-Identifier: Apache-2.0
"""The base of training engines: accumulates gradients over a batch, then takes a step. Subclasses place the weights."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from whet import devices
from whet.batch import Batch, blocks_of
from whet.column_rules import tensors_of
from whet.config.algorithm_checks import EngineUse, other_kernels
from whet.devices import HOST
from whet.engines.micro_batches import micro_batches
from whet.engines.optim import Optimizer, form_of, learning_rate, optimizers_of
from whet.engines.protocol import Columns, CopiesWeights, Narrows, Objective, Spread
from whet.engines.role import RoleSettings
from whet.engines.routing import Routing, check_biases, move_biases, summed, trained
from whet.errors import ConfigError, EngineError
from whet.kernels.compact_adamw import own_part
from whet.metrics import Metrics
from whet.models.attention import takes_one_call
from whet.models.encoders.load import encoders_of
from whet.models.load import TrainedModel, body_of, layers, rollout_tensors, stored_tensors
from whet.models.lora import adapted_layers, adapter_off, adapter_weights, fingerprint, merged_weights
from whet.models.outputs import layout_of
from whet.models.packing import LATER_MEDIA, MEDIA, Layout, same_prompt
from whet.models.routers import CHOICES
from whet.models.routing import replay
from whet.models.supported import support_of
from whet.phases import counted, span


class Engine(ABC):
    """A model with its optimizer. Takes one step for each mini-batch.

    Every rank of `process_group` gets its shard of a mini-batch. Counts and gradients are summed over ranks with
    different rows, so that N ranks take the same step as one."""

    optimizer: Optimizer | None
    row_ranks = 1  # consecutive ranks that read the same rows
    pipeline_ranks = 1  # ranks of a pipeline, one behind the other; the last one has the outputs

    def __init__(
        self,
        model: TrainedModel,
        role: RoleSettings,
        process_group: dist.ProcessGroup | None,
        device: torch.device,
        bias_rate: float = 0.0,
    ) -> None:
        self.model, self.role = model, role
        model.train(role.optim is not None)
        packing = role.forward.packing and support_of(model).is_own
        in_stretches = packing and takes_one_call(body_of(model).config.get_text_config(), device, role.forward.dtype)
        both_ways = (encoders := encoders_of(model)) is not None and bool(encoders.both_ways)
        self.forward_settings = replace(role.forward, packing=packing, in_stretches=in_stretches, both_ways=both_ways)
        self.max_tokens_per_micro_batch = role.micro_batch_tokens(device.type)
        self.grad_clip = role.grad_clip
        self.total_steps = role.total_steps
        self.process_group = process_group
        self.rows_group = process_group  # ranks that read different rows; together they read the whole mini-batch
        self.device = device
        self.steps_done = 0
        self.skipped = self.skipped_in_a_row = 0  # updates whose loss or gradient was not finite
        self._name = ""  # of the last objective
        self._loss: torch.Tensor | None = None  # of this rank's rows since the last step; None if no token counted
        self._loads = torch.zeros(())  # choices per expert since the last step, of all ranks, [L, E]
        self._probe: tuple[Batch, frozenset[str], float] | None = None  # a row of the last update, for `forward`
        self._bias_rate = bias_rate  # by which a step moves the routers' biases
        if role.optim is None:
            model.requires_grad_(False)
        elif bias_rate:
            check_biases(model, role.optim, bias_rate)
        if role.forward.replays:
            replay(layers(body_of(model)))

    @classmethod
    def spread(cls, processes: int, options: Mapping[str, Any]) -> Spread:
        """Returns the placement of a model over processes. In this base class each process has the whole model."""
        return Spread()

    @classmethod
    def refuses(cls, use: EngineUse) -> Iterable[ConfigError]:
        """Returns an error for each setting of `use` that only the engine `single` supports."""
        return other_kernels(use)

    def whole_module(self) -> PreTrainedModel | None:
        """Returns the language model itself if this rank has all of it (a rollout may sample from it), else None."""
        return None

    def adapter_off(self) -> AbstractContextManager[None]:
        return adapter_off(self.model)

    def fingerprint(self) -> str:
        return fingerprint(body_of(self.model))

    @property
    def dp_rank(self) -> int:
        return 0 if self.process_group is None else dist.get_rank(self.process_group) // self.row_ranks % self.dp_size

    @property
    def dp_size(self) -> int:
        ranks = 1 if self.process_group is None else self.process_group.size()
        return ranks // (self.row_ranks * self.pipeline_ranks)

    @property
    def is_reporting(self) -> bool:
        if self.process_group is None:
            return True
        part, place = divmod(dist.get_rank(self.process_group), self.row_ranks * self.dp_size)
        return part == self.pipeline_ranks - 1 and place % self.row_ranks == 0

    @torch.no_grad()
    def forward(self, batch: Batch, needs: frozenset[str], temperature: float = 1.0) -> dict[str, torch.Tensor]:
        """Computes outputs [B, R], or [B, R, V] over the vocabulary, without gradient, in row order, on the host."""
        columns: Columns = batch.columns()
        outputs = {name: torch.zeros(columns["response_mask"].shape) for name in needs}
        training, coming = self.model.training, list[tuple[list[int], str, torch.Tensor]]()
        if training:  # `eval` and `train` visit all modules, which takes time
            self.model.eval()
        passes = self.passes(columns, block=1)
        with self._weights_read():
            for number, rows in enumerate(passes, start=1):
                found = self.outputs(rows_of(columns, rows), needs, temperature).items()
                coming += [(rows, name, each.to(HOST, torch.float32, non_blocking=True)) for name, each in found]
                if self.device == HOST:  # no copy from a device is pending
                    _take_in(outputs, coming)
                counted(number, len(passes))
        devices.synchronize(self.device)
        _take_in(outputs, coming)
        if training:
            self.model.train()
        return outputs

    def forward_backward(self, batch: Batch, objective: Objective, counts: Columns | None = None) -> Metrics:
        """Adds the gradient of the loss of `batch`, divided by `counts`, to the gradients of earlier calls since the
        last step. Does nothing if all counts are 0, that is, if no token counts."""
        if isinstance(objective, Narrows):
            batch = objective.narrowed(batch)
        columns: Columns = batch.columns()
        optimizer, metrics, self._name = self._require_optimizer(), Metrics(), objective.name
        if counts is None:
            counts = {name: summed(count, self.rows_group) for name, count in objective.counts(columns).items()}
        if not any(bool(count > 0) for count in counts.values()):
            return metrics
        if self._loss is None:
            optimizer.zero_grad(set_to_none=True)
            self._loads = torch.zeros(())
        rows = columns["response_mask"].any(1).nonzero()[:1, 0].tolist()
        self._probe = batch[rows], objective.needs - {"vocab_log_probs"}, objective.temperature
        ranks = 1 if self.process_group is None else self.process_group.size()
        encoders = encoders_of(self.model)
        with self._weights_read(), nullcontext() if encoders is None else encoders.timed(metrics, ranks):
            loss = self.schedule(columns, objective, counts, metrics)
        self._loss = loss if self._loss is None else self._loss + loss
        return metrics

    def schedule(self, columns: Columns, objective: Objective, counts: Columns, metrics: Metrics) -> torch.Tensor:
        """Accumulates the gradient of this rank's rows.  Returns the loss of the rows.

        Runs forward and backward of one micro-batch after another. A pipeline overrides this order."""
        total = torch.zeros((), device=self.device)
        passes = self.passes(columns, objective.block)
        routing = Routing.of(self.model, objective, self.process_group, self.rows_group, self.device)
        if routing is not None and routing.coefficient:
            routing.begin(columns, counts, self._choices(columns, passes, routing))
        for number, rows in enumerate(passes, start=1):
            part = rows_of(columns, rows)
            outputs = self.outputs(part, routing.needs if routing else objective.needs, objective.temperature)
            if rows:
                loss, measured = objective.loss(outputs, self.to_device(part), counts)
                metrics.merge(measured)
                if routing is not None:
                    loss = loss + routing.loss(outputs, self.to_device(part), metrics)
                total = total + loss.detach()
            else:
                loss = 0.0 * torch.stack([value.sum() for value in outputs.values()]).sum()
            with span("backward"):
                loss.backward()  # type: ignore[no-untyped-call]
                self._keep_gradients()
            counted(number, len(passes))
        if routing is not None:
            self._loads = self._loads + routing.measure(metrics)
        return total

    def _loss_of(
        self, outputs: Columns, part: Columns | None, objective: Objective, counts: Columns, metrics: Metrics
    ) -> torch.Tensor:
        """Returns the loss of a pipeline's micro-batch, and records metrics. Without rows, loss and gradient are 0."""
        if part is None:
            return 0.0 * torch.stack([value.sum() for value in outputs.values()]).sum()
        loss, measured = objective.loss(outputs, self.to_device(part), counts)
        metrics.merge(measured)
        return loss

    @torch.no_grad()
    def _choices(self, columns: Columns, passes: list[list[int]], routing: Routing) -> torch.Tensor:
        """Counts how often each expert is chosen, over the tokens that the loss reads in this rank's rows.  [E]"""
        found = [torch.zeros(routing.experts, device=self.device)]
        for rows in passes:
            part = rows_of(columns, rows)
            chosen = self.outputs(part, frozenset({CHOICES}), 1.0)[CHOICES]
            found += [(chosen * trained(self.to_device(part))[..., None]).sum((0, 1))] if rows else []
        return torch.stack(found).sum(0)

    def step(self) -> Metrics:
        """Sums gradients over the ranks, clips them, and takes an optimizer step.

        Takes no step if no token counted (metric `empty_updates`), or if loss or gradient is not finite (metrics
        `skipped_updates`, counted over the run, and `skipped_in_a_row`)."""
        optimizer, metrics, name = self._require_optimizer(), Metrics(), self._name
        loss, self._loss = self._loss, None
        if loss is None:
            metrics.max(f"{name}/empty_updates", 1)
            return metrics
        self._sum_gradients()
        with span("optimizer"):
            norm = self._clip()
            is_finite = bool((summed(loss, self.process_group) + norm).isfinite())
            self.skipped_in_a_row = 0 if is_finite else self.skipped_in_a_row + 1
            self.skipped += not is_finite
            # All ranks measure the same number, which therefore is the mean over the ranks.
            metrics.mean(f"{name}/grad_norm", norm)
            metrics.max(f"{name}/skipped_updates", self.skipped)
            metrics.max(f"{name}/skipped_in_a_row", self.skipped_in_a_row)
            if not is_finite:
                optimizer.zero_grad(set_to_none=True)
                return metrics
            assert self.role.optim is not None
            rate = learning_rate(self.role.optim, self.steps_done, self.total_steps)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            if self._bias_rate:
                move_biases(self.model, self._loads, self._bias_rate)
            self.steps_done += 1
            metrics.mean(f"{name}/lr", rate)
        return metrics

    def discard(self) -> None:
        """Drops the gradients since the last step."""
        self._loss = None

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the full weights under their Hugging Face names: tied weights once, adapters merged. Every rank yields
        them in the same order. Biases of routers that are buffers follow, in their own dtype."""
        biases = ((name, each) for name, each in rollout_tensors(self.model).items() if isinstance(each, nn.Buffer))
        return chain(merged_weights(self.model, self._gathered), biases)

    def adapter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the adapter's full weights by their names in an adapter folder, on every rank in the same order."""
        return ((name, self._gathered(weight)) for name, weight in adapter_weights(self.model))

    def _gathered(self, weight: torch.Tensor) -> torch.Tensor:
        """Returns a weight whole and detached. Engines that shard weights gather it from the ranks."""
        return weight.detach()

    @torch.no_grad()
    def has_finite_weights(self) -> bool:
        parts = [own_part(weight) for weight in self._trained()]
        found = {} if self._probe is None else self.forward(*self._probe)
        # Norm layers square their inputs: with weights of 1e38, which are finite, their outputs become 0.
        ends = (torch.stack(part.aminmax()).float().square() for part in parts if part.numel())
        return all(bool(each.isfinite().all()) for each in (*ends, *found.values()))

    @abstractmethod
    def save(self, path: Path, start: dict[str, Any] | None) -> None:
        """Writes weights, optimizer, progress, and `start`, which describes an adapter's base. All ranks call it."""

    @abstractmethod
    def load(self, path: Path) -> dict[str, Any] | None:
        """Restores the state that `save` wrote, on all ranks.  Returns the `start` that `save` was given, if any.

        Raises: EngineError for the state of another model or engine."""

    def stored(self) -> dict[str, torch.Tensor]:
        return stored_tensors(self.model)

    @torch.no_grad()
    def copy_from(self, other: CopiesWeights) -> None:
        for own, new in zip(self.stored().values(), other.stored().values(), strict=True):
            own.copy_(new)

    def offload(self, weights: bool = True) -> None:
        self._loss = None
        self._move(HOST, weights=weights)
        devices.release(self.device)

    def onload(self) -> None:
        self._move(self.device, weights=True)

    def outputs(self, part: Columns, needs: frozenset[str], temperature: float) -> dict[str, torch.Tensor]:
        """Computes the outputs `needs` of the micro-batch `part`, which is on the host. They are differentiable."""
        where = layout_of(part, self.forward_settings, needs)
        with span("forward"):
            return self._outputs(where.to(self.device), needs, temperature)

    def to_device(self, part: Columns) -> Columns:
        """Copies a micro-batch's tensors to the device, asynchronously."""
        return {**part, **{name: devices.moved(each, self.device) for name, each in tensors_of(part).items()}}

    @abstractmethod
    def _outputs(self, where: Layout, needs: frozenset[str], temperature: float) -> dict[str, torch.Tensor]:
        """Computes the model outputs `needs` of a micro-batch that is on the device, by `outputs_of`."""

    def _weights_read(self) -> AbstractContextManager[None]:
        """Returns a context around passes that read the same weights. An engine may keep copies of weights in it."""
        return nullcontext()

    def _keep_gradients(self) -> None:  # noqa: B027  # autograd adds them up
        """Handles the gradients after each backward pass; by default leaves the sums of autograd as they are."""

    def _sum_gradients(self) -> None:  # noqa: B027  # the backward passes may have summed them
        """Sums gradients over the ranks before a step, so that they belong to the whole mini-batch."""

    @abstractmethod
    def _clip(self) -> torch.Tensor:
        """Clips the gradient.  Returns its norm before clipping, the same on every rank."""

    def passes(self, columns: Columns, block: int | str) -> list[list[int]]:
        """Splits rows into micro-batches, as lists of row numbers, and starts decoding their media. An empty list is a
        dummy pass without effect on the loss, for ranks with fewer micro-batches than other ranks."""
        if not len(columns["response_mask"]):  # more ranks than rows
            return []
        counted = columns["response_mask"].bool().any(1)
        lengths = (columns["attention_mask"].sum(1) * counted).tolist()
        settings, prompts = self.forward_settings, None
        if settings.packing and settings.share_prompts and sum(lengths) > self.max_tokens_per_micro_batch:
            prompt_width = columns["input_ids"].shape[1] - columns["response_mask"].shape[1]
            prompt_lengths = columns["attention_mask"][:, :prompt_width].sum(1)
            prompts = list(zip(same_prompt(columns).tolist(), prompt_lengths.tolist(), strict=True))
        passes = micro_batches(
            lengths,
            self.max_tokens_per_micro_batch,
            packing=settings.packing,
            block=block if isinstance(block, int) else blocks_of(columns[block]),
            prompts=prompts,
            first_fit=settings.in_stretches,
        )
        if (encoders := encoders_of(self.model)) is not None:
            fields = [columns[name] for name in (MEDIA, LATER_MEDIA) if name in columns]
            by_pass = [
                dict.fromkeys(each for row in rows for field in fields for each in field[row]) for rows in passes
            ]
            encoders.prefetch(chain.from_iterable(by_pass), None if settings.is_sharded else self.model)
        return passes

    def _evened(self, passes: list[list[int]], least: int = 0, step: int = 1) -> list[list[int]]:
        """Appends empty passes until every rank has the same number of passes: at least `least`, and a multiple of
        `step`. (All ranks take part in each pass.)"""
        most = torch.tensor(len(passes))  # on the host: gloo reduces it
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.process_group)
        count = -(-max(int(most), least) // step) * step
        return [*passes, *([] for _ in range(count - len(passes)))]

    def _trained(self) -> list[nn.Parameter]:
        return [weight for weight in self.model.parameters() if weight.requires_grad]

    def _move(self, device: torch.device, *, weights: bool) -> None:
        if self.device == HOST:
            return
        for optimizer in optimizers_of(self.optimizer):
            optimizer.zero_grad(set_to_none=True)
            for state in optimizer.state.values():
                state.update({name: value.to(device) for name, value in state.items() if value.dim()})
        if weights:
            nn.Module.to(self.model, device)

    def _checkpointed(self) -> dict[str, torch.Tensor]:
        """Returns the weights and persistent buffers for a checkpoint; with an adapter, only the adapter's weights."""
        named = stored_tensors(self.model)
        if not adapted_layers(self.model):
            return named
        return {name: each for name, each in named.items() if each.requires_grad}

    def _progress(self) -> dict[str, Any]:
        """Returns the numbers of steps taken and skipped, and the form of the optimizer's state."""
        done = {"steps_done": self.steps_done, "skipped": self.skipped, "skipped_in_a_row": self.skipped_in_a_row}
        return {**done, "optim": form_of(self.role.optim)}

    def _load_progress(self, state: dict[str, Any]) -> None:
        names = ("steps_done", "skipped", "skipped_in_a_row")
        self.steps_done, self.skipped, self.skipped_in_a_row = (operator.index(state[name]) for name in names)

    def _require_optimizer(self) -> Optimizer:
        if self.optimizer is None:
            raise EngineError("optimizer", None, "an optimizer: this model is not trained")
        return self.optimizer


def check_same(own: dict[str, torch.Size], saved: dict[str, torch.Size]) -> None:
    """Checks that the saved weights have the names and shapes of this model.  Raises: EngineError."""
    if own.keys() != saved.keys():
        different = sorted(own.keys() ^ saved.keys())
        found = f"is of another model: {len(different)} weights differ, such as {different[0]}"
        raise EngineError("state", found, "the weights of this model")
    for name, shape in own.items():
        if shape != saved[name]:
            found, expected = f"is of another model, with shape {list(saved[name])}", f"{list(shape)} as in this model"
            raise EngineError(f"state: {name}", found, expected)


def _take_in(outputs: dict[str, torch.Tensor], coming: list[tuple[list[int], str, torch.Tensor]]) -> None:
    """Writes the entries of `coming` (row numbers, output name, values) into `outputs`, and empties `coming`."""
    for rows, name, value in coming:
        if rows and outputs[name].dim() < value.dim():
            outputs[name] = torch.zeros(*outputs[name].shape, *value.shape[2:])
        if rows:
            outputs[name][rows] = value
    coming.clear()


def rows_of(columns: Columns, rows: list[int]) -> Columns:
    """Selects rows of all columns. Returns `columns` itself for all rows in order, and a dummy row for no rows."""
    if not rows:
        return _idle(columns)
    if rows == list(range(len(columns["response_mask"]))):
        return columns
    return {name: column[rows] for name, column in columns.items()}


def _idle(columns: Columns) -> Columns:
    """Returns a dummy row of two tokens, for a rank without rows in a pass in which other ranks have rows."""
    positions = columns["position_ids"]
    # Not token 0, which may be padding with an embedding of zeros: there the gradient of Gemma 3n's norms is NaN.
    ones = torch.ones(1, 2, dtype=torch.long, device=positions.device)
    place = (ones.cumsum(1) - 1).expand(1, *positions.shape[1:-1], 2)
    return {"input_ids": ones, "attention_mask": ones, "position_ids": place, "response_mask": ones[:, 1:]}
