# SPDX-License-Identifier: Apache-2.0
"""The worker that samples, and the switch of all workers between training and sampling (hybrid mode)."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from transformers import PreTrainedModel

from whet.config.schema import ModelConfig, RolloutConfig
from whet.controller.dispatch import Dispatch, register
from whet.controller.local_workers import LocalWorkers
from whet.controller.worker import Host, Placement
from whet.controller.worker_group import WorkerGroup
from whet.engines.protocol import TrainEngine
from whet.errors import DeadlineError, LostReplicaError, WhetError
from whet.models.load import load_tokenizer, torch_dtype
from whet.models.lora import adapted_layers
from whet.phases import MOVING, span
from whet.roles.telemetry import MeasuredWorker
from whet.roles.workers import TrainWorker, actor_beside, with_adapter
from whet.rollout.build import load_model, rollout_engine
from whet.rollout.protocol import (
    Event,
    LoadsAdapter,
    Lost,
    Request,
    Restarts,
    RolloutEngine,
    SharesModule,
    Sleeps,
    Span,
    Status,
    TakesDelta,
    Weights,
)
from whet.rollout.requirements import CacheRoom
from whet.weight_sync import buckets
from whet.weight_sync.buckets import Broken, Digest, Inlet, LinkClosedError, receive
from whet.weight_sync.delta import DeltaBase
from whet.weight_sync.routes import RankSite, Route, open_inlet

MEETING_PORT = 28_500  # plus the rank's number: port at which the parts of a server on several nodes connect
HALF_FILLED_SECONDS = 0.05  # between two checks whether weights, sent a second time, have arrived


class Direct:
    """The engine of a rollout worker in this process. The loop calls the engine directly, without a fleet, and the
    worker supplies the weights. Errors name the role, as errors of worker groups do."""

    num_lost = 0

    def __init__(self, worker: RolloutWorker, here: LocalWorkers) -> None:
        self._worker, self._here, self._engine = worker, here, worker.engine
        self.abort, self.pause, self.resume = self._engine.abort, self._engine.pause, self._engine.resume
        self.load, self.status, self.close = self._engine.load, self._engine.status, self._engine.close

    @property
    def reads_trained_weights(self) -> bool:
        """Tells whether the engine computes with the trainer's own tensors, without a copy and without CUDA graphs."""
        return self._worker.is_attached and self._worker.device.type == "cpu"

    def submit(self, request: Request) -> bool:
        """Submits a request to the engine.  Returns False if the engine is full."""
        with self._named("submit"):
            return self._engine.submit(request)

    def poll(self, timeout_seconds: float) -> list[Event]:
        """Samples until there are events, at most for `timeout_seconds`.  Returns them."""
        with self._named("poll"):
            return self._engine.poll(timeout_seconds)

    def sync(self, version: int) -> str:
        """Loads the weights of `version` into the engine.  Returns their digest."""
        with self._named("sync"):
            return self._worker.sync(version)

    @contextmanager
    def _named(self, method: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            described = self._here.describe(error, self._worker.role, method)
            raise described from described.__cause__


class Modes:
    """Switches the workers of all processes between training (the initial mode) and sampling."""

    def __init__(self, rollout: WorkerGroup) -> None:
        self._rollout, self._samples = rollout, False

    @contextmanager
    def rollout_mode(self) -> Iterator[None]:
        """Opens a block in which trained models and their optimizers are off the device. At its end the rollout's cache
        and own weights leave the device. A nested block changes nothing."""
        if self._samples:
            yield
            return
        try:
            with MOVING:
                self._rollout.rollout_mode()
                self._samples = True
            yield
            self._back()
        except WhetError:  # ends the run, and the workers may be closed
            raise
        except BaseException:
            if self._samples:
                self._back()
            raise

    def _back(self) -> None:
        with MOVING:
            self._rollout.trainer_mode()
            self._samples = False


class Lent:
    """Replaces the engine on a rank that lends its devices to another rank's engine, and only takes part in gathering
    weights. If the other rank is on another node, `part` is the engine's part on this node."""

    def __init__(self, options: Mapping[str, object], part: RolloutEngine | None = None) -> None:
        self._part = part
        self.takes_adapter, self.takes_delta = (options.get(name) is True for name in ("adapter", "weight_delta"))
        self.version = 0

    def load(self, weights: Weights, version: int) -> None:
        """Iterates over all weights, because all ranks must, and keeps none."""
        for _ in weights:
            pass
        self.version = version

    load_adapter = load

    def status(self) -> Status:
        """Returns a status with no requests."""
        return Status(self.version, 0, 0)

    def close(self) -> None:
        """Ends the engine's part on this node, if there is one."""
        if self._part is not None:
            self._part.close()


class RolloutWorker(MeasuredWorker):
    """A rank that samples. If its engine can, it samples with the module of an actor in its process; otherwise it gets
    weights of its own by `load`. Of every `num_ranks` ranks the first has an engine, on the devices of all of them."""

    is_replica = True

    def __init__(
        self,
        placement: Placement,
        config: RolloutConfig,
        tokenizer_path: str,
        model: ModelConfig,
        num_devices: int = 1,
        num_ranks: int = 1,
        cache_room: CacheRoom | None = None,
    ) -> None:
        super().__init__(placement)
        self.dtype, self._model, self._num_ranks = torch_dtype(config.dtype), model, num_ranks
        load = cache(partial(load_tokenizer, tokenizer_path, trust_remote_code=model.trust_remote_code))
        made, (span, is_first) = None, self._place(placement.hosts)
        if is_first:
            made = rollout_engine(config, self.dtype, load, self.device, model, num_devices, cache_room, span)
        self.engine: Any = made if self.is_reporting else Lent(config.engine.options, made)
        self._owns_module = self.is_attached = False
        self._inlet: Inlet | None = None
        self._base: DeltaBase | None = None  # of deltas
        self._is_half_filled = False  # the link broke while weights went into the engine
        self._queue = deque[Request]()  # requests that the full engine did not take yet
        self._turn = threading.Lock()  # guards the engine: weights arrive in a thread of their own
        if self.is_reporting and not (self.role == "rollout" and self.is_beside_actor()):
            self._load()

    @property
    def dp_rank(self) -> int:
        return self.rank // self._num_ranks

    @property
    def dp_size(self) -> int:
        return self.world_size // self._num_ranks

    @property
    def is_reporting(self) -> bool:
        return self.rank % self._num_ranks == 0

    @register(Dispatch.ONE_TO_ALL)
    def serve(
        self, requests: Sequence[Request], aborted: Sequence[str], timeout_seconds: float, gathers: bool
    ) -> list[Event | Lost]:
        """Takes requests, ends the `aborted` requests, samples, and returns at the first events. With `gathers` it
        samples for `timeout_seconds` or until no request is left, and returns all events. The last may be a `Lost`.

        Raises: EngineError, WeightSyncError."""
        events = list[Event | Lost]()
        self._queue += requests
        try:
            with span("rollout"):
                self._sample(events, aborted, time.monotonic() + timeout_seconds, gathers)
        except LostReplicaError as error:
            self._queue.clear()
            events.append(Lost(str(error)))
        return events

    def _sample(self, events: list[Event | Lost], aborted: Sequence[str], until: float, gathers: bool) -> None:
        if aborted:
            with self._turn:
                self.engine.abort(aborted)
        while True:
            if self._is_half_filled:  # all weights are sent again, or the run ends
                time.sleep(max(0.0, min(HALF_FILLED_SECONDS, until - time.monotonic())))
                return
            with self._turn:
                while self._queue and self.engine.submit(self._queue[0]):
                    self._queue.popleft()
                events += self.engine.poll(max(0.0, until - time.monotonic()))
                status = self.engine.status() if gathers else None
            is_idle = status is not None and not (status.running or status.waiting or self._queue)
            if (events and not gathers) or is_idle or time.monotonic() >= until:
                return

    @register(Dispatch.ONE_TO_ALL)
    def restart(self) -> None:
        """Starts a lost engine again, with the newest weights.  Raises: EngineError, WeightSyncError."""
        assert isinstance(self.engine, Restarts)
        self.engine.restart()  # takes long, and weights may arrive meanwhile
        with self._turn:
            self.engine.rejoin()

    @register(Dispatch.ONE_TO_ALL)
    def pause(self) -> None:
        """Stops sampling until `resume`."""
        with self._turn:
            self.engine.pause()

    @register(Dispatch.ONE_TO_ALL)
    def resume(self) -> None:
        """Continues after `pause`."""
        with self._turn:
            self.engine.resume()

    @register(Dispatch.ONE_TO_ALL)
    def status(self) -> Status:
        """Returns the status of this rank's engine: version of its weights, numbers of requests."""
        return self.engine.status()

    @register(Dispatch.ONE_TO_ALL)
    def is_beside_actor(self) -> bool:
        """Tells whether this process has a rank of the actor too."""
        return "actor" in self.neighbours

    @register(Dispatch.ONE_TO_ALL)
    def sync(self, version: int) -> str:
        """Takes the weights of `version` from the actor in this process.  Returns their digest. If it can, the engine
        samples from the actor's own module, which must be whole on this rank, have the same dtype, and have no adapter
        that slows down every token."""
        actor = actor_beside(self)
        module, weights = actor.engine.whole_module(), actor.engine.named_weights()
        if isinstance(self.engine, SharesModule):
            self.is_attached = (
                module is not None
                and module.dtype == self.dtype == torch_dtype(actor.settings.dtype)
                and not adapted_layers(module)
            )
            if module is not None and self.is_attached:
                return buckets.attach(self.engine, module, weights, version)
        elif self.takes_adapter():
            weights = with_adapter(actor.engine).adapter_weights()
        self._take_module(module)
        return buckets.copy(self._fill, weights, version, self.dtype)

    def _take_module(self, module: PreTrainedModel | None) -> None:
        """Creates a separate module for an engine that samples from a module of this process."""
        if isinstance(self.engine, SharesModule) and not self._owns_module:
            if module is not None:
                self.engine.adopt(module)
            else:
                self._load()
        self._owns_module = True

    @register(Dispatch.ONE_TO_ALL)
    def takes_adapter(self) -> bool:
        """Tells whether this rank's engine keeps the base weights and receives only the trained adapter."""
        return isinstance(self.engine, LoadsAdapter) and self.engine.takes_adapter

    @register(Dispatch.ONE_TO_ALL)
    def takes_delta(self) -> bool:
        """Tells whether this rank receives deltas: only the elements of weights that changed since the last version."""
        return isinstance(self.engine, TakesDelta) and self.engine.takes_delta

    def _fill(self, weights: Weights, version: int) -> None:
        with span("weight sync"):
            if isinstance(self.engine, LoadsAdapter) and self.engine.takes_adapter:
                self.engine.load_adapter(weights, version)
            else:
                self.engine.load(weights, version)

    @register(Dispatch.ONE_TO_ALL, concurrent=True)
    def site(self) -> RankSite:
        """Returns the machine, address and accelerator of this rank."""
        return RankSite.here(self.address, self.device)

    @register(Dispatch.ALL_TO_ALL, concurrent=True)
    def open_inlet(self, route: Route, deadline_seconds: float) -> None:
        """Opens this rank's end of the link to the trainer. It replaces an earlier one."""
        self._close_link()
        self._inlet = open_inlet(route, deadline_seconds, self.device)
        self._base = DeltaBase() if self.takes_delta() else None

    @register(Dispatch.ONE_TO_ALL, concurrent=True)
    def receive(self, version: int) -> str | Broken:
        """Receives the weights of `version` over the link.  Returns their digest, or Broken if the link broke. While
        requests are being sampled, weights are first collected in memory, then loaded between two decode steps.

        Raises: WeightSyncError."""
        assert self._inlet is not None
        digest = Digest()
        try:
            weights = receive(self._inlet, version, digest, self._base)
            with self._turn:
                status = self.engine.status()
                is_sampling = bool(status.running or status.waiting)
                if not is_sampling:
                    self._is_half_filled = True
                    self._fill(weights, version)
            if is_sampling:
                gathered = {name: weight.clone() for name, weight in weights if self._base is None}
                with self._turn:
                    self._fill((gathered if self._base is None else self._base.weights).items(), version)
        except BaseException as error:
            self._close_link()  # so that the trainer does not wait for this rank
            if isinstance(error, DeadlineError | LinkClosedError):
                return Broken(error)
            raise
        self._is_half_filled = False
        return str(digest)

    @register(Dispatch.ONE_TO_ALL)
    def rollout_mode(self) -> None:
        """Moves trained models and optimizers of this process off the device, except weights that the engine shares."""
        for role, engine in self._engines_beside().items():
            engine.offload(weights=not (self.is_attached and role == "actor"))
        self._meet()
        if isinstance(self.engine, Sleeps):
            self.engine.wake()

    @register(Dispatch.ONE_TO_ALL)
    def trainer_mode(self) -> None:
        """Frees the memory that only sampling needs, and moves trained models and optimizers back to the device."""
        if isinstance(self.engine, Sleeps):
            self.engine.sleep()
        self._meet()
        for engine in self._engines_beside().values():
            engine.onload()

    def close(self) -> None:
        self._close_link()
        self.engine.close()

    def _meet(self) -> None:
        """Waits for all ranks of the pool if the engine uses devices of several ranks and the pool also trains."""
        if self._num_ranks > 1 and self.process_group is not None:
            torch.distributed.all_reduce(torch.zeros(()), group=self.process_group)  # a barrier, on the host

    def _place(self, hosts: Sequence[Host]) -> tuple[Span | None, bool]:
        """Returns the engine's part on this node (None if it has only one node), and whether this rank starts the part.
        The first rank on a node starts it, with the devices of all ranks of the engine on the node."""
        first = self.dp_rank * self._num_ranks
        together = hosts[first : first + self._num_ranks]
        if not together or self._num_ranks == 1:
            return None, self.is_reporting
        nodes, own = [*dict.fromkeys(each.node for each in together)], together[self.rank - first].node
        here = [index for index, each in enumerate(together) if each.node == own]
        is_first = self.rank == first + here[0]
        if is_first and any(devices := [together[index].devices for index in here]):
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        span = Span(len(nodes), nodes.index(own), together[0].address, MEETING_PORT + first)
        return span if len(nodes) > 1 else None, is_first

    def _close_link(self) -> None:
        if self._inlet is not None:
            self._inlet.close()

    def _load(self) -> None:
        load_model(self.engine, self._model, self.device, self.dtype)
        self._owns_module = True

    def _engines_beside(self) -> dict[str, TrainEngine]:
        return {role: each.engine for role, each in self.neighbours.items() if isinstance(each, TrainWorker)}
