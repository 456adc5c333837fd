# SPDX-License-Identifier: Apache-2.0
"""Trains the clients' models with engines: in the server's process, or on each rank of several processes."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from whet import serialization
from whet.batch import Batch
from whet.config.cluster import ResourcePool
from whet.controller.dispatch import Dispatch, register
from whet.controller.launch import launch
from whet.controller.worker import Placement, Worker, WorkerSpec
from whet.engines.optim import optimizers_of
from whet.engines.role import RoleSettings
from whet.errors import ConfigError, DataError, EngineError, WhetError
from whet.models.load import TrainedModel, load_policy
from whet.models.routers import auxiliary_coefficient
from whet.plugins.serving.tinker.losses import (
    CROSS_ENTROPY,
    SHORT,
    DatumRows,
    SumObjective,
    number_of,
    objective_of,
    targets_of,
)
from whet.plugins.serving.tinker.store import STATE, WHOLE
from whet.plugins.serving.tinker.wire import LossRequest, write_loss_output
from whet.registry import ENGINES

# Numbers of the SDK's AdamParams.
ADAM = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}
RANKS_SECONDS = 86400.0  # limit of a call of the ranks, since training on a request may take long
# Errors that a request has on all ranks, or after the last call that ranks take part in together.
FAILURES = (WhetError, OSError, ValueError, TypeError, LookupError, OverflowError)
Engine = Any  # whet.engines.engine.Engine, which a file of this layer does not import


@dataclass(frozen=True)
class Base:
    """The base model in a folder; it stays in memory after its first use."""

    folder: str
    trust_remote_code: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Base, (self.folder, self.trust_remote_code)  # another process reads the folder

    @cached_property
    def module(self) -> PreTrainedModel:
        """Returns the model, with all weights frozen.  Raises: ModelError."""
        module = load_policy(self.folder, trust_remote_code=self.trust_remote_code)
        return module.requires_grad_(False).eval()


@dataclass(frozen=True)
class SharedRole(RoleSettings):
    """The settings of one of several models in a process. An adapter's module copies `base` but shares the weights."""

    base: Base | None = None

    def whole_model(self) -> TrainedModel:
        """Loads the model from its files, or puts an adapter on the weights of the base."""
        if self.base is None or self.lora is None:
            return super().whole_model()
        base = self.base.module
        module = copy.deepcopy(base, {id(each): each for each in (*base.parameters(), *base.buffers())})
        return self._prepared(module.requires_grad_(True))


class Training:
    """The training engines of models. One thread calls all methods, in the same order on each rank of `group`."""

    def __init__(self, base: Base, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self._base, self._device, self._group = base, device, group
        self.engines: dict[str, Engine] = {}

    def create(self, model_id: str, role: SharedRole) -> None:
        """Creates a model.  Raises: ConfigError, ModelError."""
        entry = ENGINES[role.engine.name]
        given = {"role": replace(role, base=self._base), "process_group": self._group, "device": self._device}
        self.engines[model_id] = entry.make(given, entry.resolve_options(role.engine.options, "engine.options"))

    def _engine(self, model_id: str) -> Engine:
        if model_id not in self.engines:
            raise EngineError(model_id, "was not created: its request failed", "a model", "create another model")
        return self.engines[model_id]

    def drop(self, model_id: str) -> None:
        """Frees a model."""
        self.engines.pop(model_id, None)

    def loss(self, request: LossRequest, vocab_size: int, context: int) -> Iterator[bytes | None]:
        """Computes a loss, and accumulates its gradient for the next step. Yields None after each part of the work, and
        finally a ForwardBackwardOutput.  Raises: DataError, RegistryError, ConfigError."""
        if not request.data:
            raise DataError("data", "is empty", "rows")
        engine = self._engine(request.model_id)
        rows = DatumRows.of(request.data, request.loss, vocab_size, context)
        objective = objective_of(request.loss, request.options, is_picked=rows.is_picked)
        objective.check(rows.batch)
        is_done = request.forward_only
        try:
            reply = yield from self._passes(engine, request, rows, objective)
            is_done = True
        finally:
            if not is_done:  # a part of the rows has added its gradient
                engine.discard()
        yield reply

    def _passes(
        self, engine: Engine, request: LossRequest, rows: DatumRows, objective: SumObjective
    ) -> Generator[None, None, bytes]:
        """Runs the passes of a request, and yields after each.  Returns a ForwardBackwardOutput."""
        batch, everything = rows.batch, rows.with_all_places()
        counts = objective.counts(batch.columns())
        if not request.forward_only:
            for part in self._parts(engine, batch, objective):
                engine.forward_backward(batch[part], objective, counts)
                yield None
        seen, is_whole = dict(objective.seen), torch.equal(batch["response_mask"], everything["response_mask"])
        if request.forward_only or (request.loss == CROSS_ENTROPY and not is_whole and SHORT not in request.options):
            for part in self._parts(engine, everything, objective):
                whole, own = everything[part], batch[part]
                outputs = engine.forward(whole, objective.needs)
                found, trained = targets_of(outputs, whole.columns()), own["response_mask"].bool()
                for row, all_places, mask in zip(part, found, trained, strict=True):
                    keeps = mask if found.ndim == 2 else mask[:, None]
                    seen[row] = torch.where(keeps, seen[row], all_places) if row in seen else all_places
                if request.forward_only and part:
                    objective.loss(outputs, own.columns(), counts)
                yield None
        total = float(torch.stack(objective.total_loss).sum()) if objective.total_loss else 0.0
        if self._group is not None:
            found_by: list[Any] = [None] * self._group.size()
            dist.all_gather_object(found_by, (seen, total) if engine.is_reporting else ({}, 0.0), self._group)
            seen, total = {row: each for own, _ in found_by for row, each in own.items()}, sum(n for _, n in found_by)
        return write_loss_output(rows.outputs(seen), {"loss:sum": total})

    def _parts(self, engine: Engine, batch: Batch, objective: SumObjective) -> Iterable[list[int]]:
        """Returns this rank's rows for each forward pass; ranks have equally many passes. A pass has one row if the
        loss reads the whole vocabulary, all rows if there are several ranks or experts with an auxiliary loss."""
        block = int(objective.block)
        rows = [row for row in range(len(batch)) if row // block % engine.dp_size == engine.dp_rank]
        if objective.is_picked:
            return (rows[at : at + 1] for at in range(-(-len(batch) // engine.dp_size)))
        if self._group is not None or auxiliary_coefficient(engine.model.config):
            return [rows]
        found: list[list[int]] = engine.passes(batch.columns(), block)
        return found

    def step(self, model_id: str, params: Mapping[str, Any]) -> dict[str, float]:
        """Takes an AdamW step with the SDK's parameters.  Returns metrics.  Raises: ConfigError."""
        engine = self._engine(model_id)
        given = (number_of(f"adam_params.{name}", params.get(name, default)) for name, default in ADAM.items())
        lr, beta1, beta2, eps, decay, clip = given
        betas_fit, is_clip = 0 <= beta1 < 1 and 0 <= beta2 < 1, not np.isnan(clip)
        if not (0 <= lr < np.inf and betas_fit and 0 < eps < np.inf and 0 <= decay < np.inf and is_clip):
            raise ConfigError("adam_params", str(dict(params)), "rates from 0 to 1, and an eps over 0")
        optim = engine.role.optim.model_copy(update={"lr": lr, "betas": (beta1, beta2), "eps": eps})
        engine.role, engine.grad_clip = replace(engine.role, optim=optim), clip if clip > 0 else None
        for optimizer in optimizers_of(engine.optimizer):
            for group in optimizer.param_groups:
                is_decayed = any(weight.dim() >= 2 for weight in group["params"])
                group.update(betas=(beta1, beta2), eps=eps, weight_decay=decay if is_decayed else 0.0)
        found = engine.step().reduce()
        return {name.rpartition("/")[2]: float(value) for name, value in found.items()}

    def save(self, model_id: str, place: Path, trains: bool) -> None:
        """Writes all trained weights, and the engine's state if it `trains`."""
        engine = self._engine(model_id)
        weights = engine.adapter_weights() if engine.role.lora is not None else engine.named_weights()
        whole = {name: each.cpu() for name, each in weights}  # every rank takes part
        if trains:
            engine.save(place / STATE, None)
        if self._group is None or dist.get_rank(self._group) == 0:  # last: if it fails, no other rank waits
            serialization.save(place / WHOLE, whole)

    def load(self, model_id: str, place: Path, optimizer: bool) -> None:
        """Loads weights, with the optimizer's state or a new one, and drops the gradient since the last step.  Raises:
        EngineError for another model's weights."""
        engine = self._engine(model_id)
        if not (place / STATE).exists():
            raise EngineError(place.name, "has no state to train from", "weights that save_state wrote")
        engine.load(place / STATE)
        engine.discard()
        if not optimizer:
            engine.steps_done = 0
            for each in optimizers_of(engine.optimizer):
                each.state.clear()


class TrainingRank(Worker):
    """A rank of the training processes."""

    def __init__(self, placement: Placement, base: Base) -> None:
        super().__init__(placement)
        self._training = Training(base, self.device, self.process_group)

    @register(Dispatch.ONE_TO_ALL)
    def do(self, method: str, arguments: Sequence[Any]) -> Any:
        """Calls a method of `Training`. Returns an error of the request, since raising it would end all ranks."""
        try:
            found = getattr(self._training, method)(*arguments)
            return [*found][-1:] if isinstance(found, Iterator) else found
        except FAILURES as error:
            return error


class TrainingRanks:
    """Calls `Training` on each rank, in processes that this one starts."""

    def __init__(self, base: Base, processes: int) -> None:
        spec = WorkerSpec("training", TrainingRank, (base,))
        self._group = launch([spec], ResourcePool(processes), RANKS_SECONDS)["training"]
        self.close = self._group.close

    def __call__(self, method: str, *arguments: Any) -> Any:
        """Returns the first rank's result of a method.  Raises: the method's errors; WorkerError if ranks are lost."""
        found = self._group.call("do", method, arguments)
        for each in found:
            if isinstance(each, Exception):
                raise each
        return found[0]
